"""The daemon: the one place that builds the engine and its faces and runs them together."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import trio
import trio.lowlevel

from kvcsfs.batch.face import BatchFace
from kvcsfs.config import Config
from kvcsfs.engine.engine import Engine
from kvcsfs.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kvcsfs.fuse.mount import Mount

log = logging.getLogger(__name__)

EARLY_SECONDS = 2.0  # a recovery that takes longer goes on while the store answers
PROGRESS_SECONDS = 1.0
NOTIFY_SECONDS = 1.0  # the event loop must not stand still because systemd doesn't read
RELOAD_SECONDS = 10.0
STOP_SECONDS = 90.0  # then the process ends whatever still runs; systemd would kill it after 120
STILL_SECONDS = 15.0  # the same when the event loop doesn't turn


def run(read: Callable[[], Config]) -> None:
    """Serve what `read` says until SIGTERM or SIGINT; SIGHUP reads again. Raises ConfigError when it can't start."""
    try:
        trio.run(_serve, read, restrict_keyboard_interrupt_to_checkpoints=True)
    except BaseExceptionGroup as group:
        refused, others = group.split(ConfigError)
        if refused is None or others is not None:
            raise
        raise first_of(refused) from None  # not in `except*`: Python 3.11.2 wraps what is raised there


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in nested groups."""
    exc: BaseException = group
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


async def _serve(read: Callable[[], Config]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        config = read()
        engine = Engine(config)
        stopped = threading.Event()
        async with AsyncExitStack() as stack:
            stack.callback(stopped.set)
            await stack.enter_async_context(engine.running())
            face = BatchFace(engine, config.socket, config.socket_group)
            if config.metrics:
                stack.callback(_serve_metrics(engine, config.metrics))
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(face.serve)
            with trio.move_on_after(EARLY_SECONDS):
                await engine.volumes.recovered()
            mount = await _mount(engine, config, nursery)
            _announce(config)
            async with trio.open_nursery() as telling:
                telling.start_soon(_tell_recovery, engine, config)
                async for number in signals:
                    if number == signal.SIGHUP:
                        await _reload(engine, read)
                        continue
                    log.info("stopping on %s", signal.Signals(number).name)
                    break
                telling.cancel_scope.cancel()
            notify("STOPPING=1")
            _bound_the_stop(stopped)
            face.stop()
            if mount is not None:
                await mount.stop()


async def _mount(engine: Engine, config: Config, nursery: trio.Nursery) -> Mount | None:
    if config.mount is None:
        return None
    try:
        from kvcsfs.fuse.mount import Mount  # a store without a mount works without pyfuse3's library
    except ImportError as exc:
        raise ConfigError(
            f"mount: {exc}; expected pyfuse3 and libfuse3: pip install 'kvcsfs[daemon]', apt install libfuse3-3"
        ) from None
    mount = Mount(engine, config.mount)
    await mount.start(nursery)
    return mount


async def _reload(engine: Engine, read: Callable[[], Config]) -> None:
    """Read the configuration again. One that can't be taken is told, and the old one stays."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    outcome = "configuration reloaded"
    try:
        with trio.fail_after(RELOAD_SECONDS):  # it looks at the backing directories, and one may hang
            engine.reload(await trio.to_thread.run_sync(read, abandon_on_cancel=True))
    except ConfigError as exc:
        outcome = f"not reloaded: {exc}"
    except trio.TooSlowError:
        outcome = "not reloaded: a backing directory doesn't answer"
    log.info("%s", outcome)
    notify(f"READY=1\nSTATUS={outcome}")


def _where(config: Config) -> str:
    return f"socket={config.socket}" + (f" mount={config.mount}" if config.mount else "")


def _announce(config: Config) -> None:
    print(f"kvcsfs ready {_where(config)}", flush=True)
    notify("READY=1")


async def _tell_recovery(engine: Engine, config: Config) -> None:
    """Keep systemd's status line true: how far recovery is, then that it is over."""
    while waiting := [m for m in engine.status()["mountpoints"] if m["state"] == "recovering"]:
        share = sum(m["recovered_share"] for m in waiting) / len(waiting)
        entries = sum(m["recovered_entries"] for m in waiting)
        notify(f"STATUS=recovering, {share:.0%}, {entries} entries read; {_where(config)}", 0)
        with trio.move_on_after(PROGRESS_SECONDS):
            await engine.volumes.recovered()
    notify(f"STATUS=serving, {_where(config)}")


def _bound_the_stop(stopped: threading.Event) -> None:
    """End the process when the event loop stands still, or the stop takes for ever: committed values are on disk.

    A file system that hangs is given up by its lane within seconds; a large snapshot may take its time.
    """
    turned = begun = time.monotonic()

    async def turn() -> None:
        nonlocal turned
        while True:
            turned = time.monotonic()
            await trio.sleep(1)

    def watch() -> None:
        while max(time.monotonic() - turned - STILL_SECONDS, time.monotonic() - begun - STOP_SECONDS) < 0:
            if stopped.wait(1):
                return
        log.error("not stopped after %.0f s, ending anyway", time.monotonic() - begun)
        os._exit(1)

    trio.lowlevel.spawn_system_task(turn)
    threading.Thread(target=watch, name="kvcsfs-stop", daemon=True).start()


def notify(state: str, seconds: float = NOTIFY_SECONDS) -> None:
    """Tell systemd, if it started us; what it doesn't take in time is lost. Source: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(seconds)
            sock.sendto(state.encode(), address)
    except BlockingIOError:  # progress: there will be more
        pass
    except OSError as exc:
        log.warning("systemd could not be told %s: %s", state.splitlines()[0], exc.strerror or exc)


def _serve_metrics(engine: Engine, address: str) -> Callable[[], None]:
    """Serve Prometheus metrics over HTTP; returns what stops it. Raises ConfigError."""
    from prometheus_client import CollectorRegistry, start_http_server  # not needed without metrics
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[Metric]:
            mountpoints = engine.status()["mountpoints"]
            for name in [k for k, v in mountpoints[0].items() if isinstance(v, int) and k != "index"]:
                counter = name in engine.volumes[0].counters
                family = CounterMetricFamily if counter else GaugeMetricFamily
                metric = family(
                    f"kvcsfs_{name}", f"{name.replace('_', ' ')} of a mountpoint", labels=["mountpoint"]
                )
                for mountpoint in mountpoints:
                    metric.add_metric([str(mountpoint["index"])], mountpoint[name])
                yield metric

    registry = CollectorRegistry()
    registry.register(Collector())
    host, _, port = address.rpartition(":")
    try:
        server, _ = start_http_server(int(port), addr=host, registry=registry)
    except OSError as exc:
        raise ConfigError(f"metrics: can't listen at {address}: {exc.strerror}") from exc
    return server.shutdown
