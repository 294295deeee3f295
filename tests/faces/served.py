"""A store with its socket, and blocking clients of it in threads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from kvcsfs.batch.face import BatchFace
from kvcsfs.engine.engine import Engine
from tests.rawclient import RawClient
from tests.stores import bytes_on_disk, config, running


@asynccontextmanager
async def serving(path: Path, capacity: int = 64 << 20) -> AsyncIterator[Engine]:
    """An engine with its socket at `path / "sock"`."""
    settings = config(path, capacity)
    async with running(settings) as engine, trio.open_nursery() as nursery:
        face = BatchFace(engine, settings.socket)
        nursery.start_soon(face.serve)
        yield engine
        face.stop()


async def with_client(path: Path, script: Callable[[RawClient], object]) -> None:
    """Run a script of blocking calls in a thread, with a client of its own."""

    def run() -> None:
        with RawClient(path / "sock") as client:
            script(client)

    await trio.to_thread.run_sync(run)


async def nothing_held(engine: Engine) -> None:
    """Wait until no lease, reservation or pin is left; a staged file would be counted too."""
    volume = engine.volumes[0]
    with trio.fail_after(5):
        while True:
            status = engine.status()
            held = (
                status["leases"],
                status["reservations"],
                volume.catalog.pinned,
                volume.catalog.ledger.reserved,
            )
            if held == (0, 0, 0, 0) and not volume.catalog.retired:
                break
            await trio.sleep(0.001)
    assert bytes_on_disk(volume.config.path) == volume.catalog.ledger.used
