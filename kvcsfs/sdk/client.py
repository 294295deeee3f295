"""The synchronous client of the daemon at a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from kvcsfs import wire
from kvcsfs.errors import KvcsError, KvcsTimeoutError
from kvcsfs.sdk.buffers import check_source, check_targets
from kvcsfs.sdk.channel import Channel
from kvcsfs.sdk.core import Core, ask, give_up, nothing_done, open_places
from kvcsfs.sdk.deadline import Deadline, check_seconds
from kvcsfs.sdk.gets import Get
from kvcsfs.sdk.keys import check_keys, check_types, keys_of
from kvcsfs.sdk.metrics import Meter, Reporter
from kvcsfs.sdk.puts import Put
from kvcsfs.sdk.results import (
    Buffer,
    LLBatchOptions,
    LLDeleteResult,
    LLGetIntoResult,
    LLGetItemOpt,
    LLGetResult,
    LLPutItem,
    LLPutResult,
    LLQueryResult,
)
from kvcsfs.sdk.workers import Pool

DEFAULT_SOCKET = "/var/run/kvcs/efc-grpc.sock"
MAX_SOCKET_PATH_BYTES = 107  # sun_path and its NUL, unix(7)
CLOSE_SECONDS = 5.0

_QUERY_STATUS = {0: "not_found", -errno.ETIMEDOUT: "timeout"} | dict.fromkeys(
    (-errno.EINVAL, -errno.ENAMETOOLONG), "invalid_argument"
)
_DEFAULTS = LLBatchOptions()

_NOTHING = contextlib.nullcontext()
_clients: weakref.WeakSet[KvcsLowLevelClient] = weakref.WeakSet()


def _forget_all() -> None:
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_forget_all)


def _limit(name: str, value: int, default: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not 0 <= value <= highest:
        raise ValueError(f"{name} must be 0 (for {default}) or 1 to {highest}, not {value}")
    return value or default


def _socket_path(path: str | os.PathLike[str] | None) -> str:
    if path is None:
        path = os.environ.get("KVCS_SOCKET") or DEFAULT_SOCKET
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"efc_socket must be a path, not {type(path).__name__}")
    path = os.fspath(path)
    if not path or "\0" in path:
        raise ValueError("efc_socket must be the path of the daemon's socket, not empty")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"efc_socket is longer than the {MAX_SOCKET_PATH_BYTES} bytes that a Unix socket's path may have"
        )
    return path


class KvcsLowLevelClient:
    """Reads and writes batches of values. One client serves any number of threads; it connects at the first call."""

    def __init__(
        self,
        efc_socket: str | os.PathLike[str] | None = None,
        *,
        max_keys_per_batch: int = 0,
        iov_size: int = 0,
        max_value_size: int = 0,
        max_key_size: int = 0,
        log_path: str | os.PathLike[str] | None = None,
        get_workers: int = 0,
        set_workers: int = 0,
        simple_workers: int = 0,
        perf_report_interval_sec: float = 0,
        enable_metrics: bool = False,
        default_deadline_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        verify_reads: bool = True,
    ) -> None:
        """For every limit 0 is the default.

        Args:
            efc_socket: the daemon's socket; None for $KVCS_SOCKET, else /var/run/kvcs/efc-grpc.sock.
            max_keys_per_batch: keys of one request; a larger batch is split. Default 256.
            iov_size: taken for compatibility, without effect.
            max_value_size: bytes; default 4 MiB, at most 4 GiB.
            max_key_size: bytes of UTF-8; default 256, at most 1024.
            log_path: file for the performance report; None for the logger `kvcs`.
            get_workers, set_workers, simple_workers: threads; default 4, 4, 2.
            perf_report_interval_sec: seconds between two lines of throughput and latency; 0 for none.
            default_deadline_s: of calls that name none; 0 for no limit.
            verify_reads: check what was read against its checksum.
        Raises:
            TypeError, ValueError: an argument that can't be used.
        """
        path = _socket_path(efc_socket)
        _limit("iov_size", iov_size, 0, 1 << 62)
        self._default_seconds = check_seconds("default_deadline_s", default_deadline_s)
        connect_seconds = check_seconds("connect_timeout_s", connect_timeout_s)
        report_seconds = check_seconds("perf_report_interval_sec", perf_report_interval_sec)
        if log_path is not None and not isinstance(log_path, str | os.PathLike):
            raise TypeError(f"log_path must be a path, not {type(log_path).__name__}")
        simple = Pool("simple", _limit("simple_workers", simple_workers, 2, 1024))
        meter = Meter() if enable_metrics or perf_report_interval_sec else None
        self._core = Core(
            channel=Channel(path, connect_seconds, simple.submit),
            getters=Pool("get", _limit("get_workers", get_workers, 4, 1024)),
            setters=Pool("set", _limit("set_workers", set_workers, 4, 1024)),
            simple=simple,
            max_keys=min(_limit("max_keys_per_batch", max_keys_per_batch, 256, 1 << 31), wire.MAX_KEYS),
            max_key_size=_limit("max_key_size", max_key_size, 256, wire.MAX_KEY_BYTES),
            max_value_size=_limit("max_value_size", max_value_size, 4 << 20, wire.MAX_VALUE_BYTES),
            verify_reads=bool(verify_reads),
            meter=meter,
        )
        self._metrics_on = bool(enable_metrics)
        reporter = (
            Reporter(meter, report_seconds, log_path or None) if meter and perf_report_interval_sec else None
        )
        _clients.add(self)
        self._pools: tuple[Pool, ...] = (self._core.getters, self._core.setters, simple)
        self._end = weakref.finalize(self, _end, self._core.channel, self._pools, reporter)
        self._end.atexit = False  # daemon threads and descriptors end with the process

    # -- the five calls

    def ll_batch_query(
        self, keys: Sequence[str], deadline_s: float | None = None, opts: LLBatchOptions | None = None
    ) -> list[LLQueryResult]:
        """Say which keys hold a value, and of what size.

        Raises:
            KvcsTimeoutError: nothing is known. KvcsUnavailableError: no daemon.
        """
        deadline, options = self._begin(deadline_s, opts)
        keys = check_types(keys)
        statuses = check_keys(keys, self._core.max_key_size)
        renew, index = bool(options.renew), options.mountpoint_index
        with self._call("exists", statuses, ()):
            places = open_places(statuses)
            try:
                ask(
                    self._core,
                    keys,
                    statuses,
                    lambda id_, sent: wire.Query(id_, index, sent, renew),
                    deadline,
                )
            except KvcsTimeoutError:
                if nothing_done(statuses, places):
                    raise
                give_up(statuses, -errno.ETIMEDOUT)
        named = _QUERY_STATUS
        return [
            LLQueryResult(key, "ok", size)
            if size > 0
            else LLQueryResult(key, named.get(size, "unavailable"), 0)
            for key, size in zip(keys, statuses, strict=True)
        ]

    def ll_batch_match(
        self, keys: Sequence[str], deadline_s: float | None = None, opts: LLBatchOptions | None = None
    ) -> int:
        """Count the keys that hold a value before the first that doesn't, as of a chain's blocks; one query.

        Raises as `ll_batch_query`.
        """
        results = self.ll_batch_query(keys, deadline_s, opts)
        return next((i for i, result in enumerate(results) if not result.exists), len(results))

    def ll_batch_get_items(
        self,
        items: Sequence[LLGetItemOpt],
        deadline_s: float | None = None,
        opts: LLBatchOptions | None = None,
    ) -> list[LLGetResult]:
        """Read values into new memory.

        Returns:
            results in the order of `items`; status > 0 is the size of `data` in bytes, 0 a miss, < 0 -errno.
        Raises:
            KvcsTimeoutError: nothing was read. KvcsUnavailableError: no daemon.
        """
        deadline, options = self._begin(deadline_s, opts)
        keys = keys_of(items, "LLGetItemOpt")
        get = self._get(keys, None, deadline, options)
        statuses, data = get.statuses, get.data
        if statuses and min(statuses) <= 0:
            data = [piece if status > 0 else None for piece, status in zip(data, statuses, strict=True)]
        return list(map(LLGetResult, statuses, data, keys, _sizes(get)))

    def ll_batch_get_into_items(
        self,
        items: Sequence[LLGetItemOpt],
        buffers: Sequence[Buffer | Sequence[Buffer]],
        deadline_s: float | None = None,
        opts: LLBatchOptions | None = None,
    ) -> list[LLGetIntoResult]:
        """Read values straight into the caller's memory.

        Args:
            buffers: one for each item, writable and C-contiguous, none sharing memory with another; a list or
                tuple of buffers is filled in order.
            deadline_s: seconds for the whole call; None for the client's default, 0 for no limit.
        Returns:
            results in the order of `items`; status > 0 is the value's size in bytes, 0 a miss, < 0 -errno
            (-ENOSPC: `size` says how many bytes that buffer needs, and it is untouched).
        Raises:
            ValueError: buffers that can't be used, before any byte moves. KvcsTimeoutError: nothing was read.
            KvcsUnavailableError: no daemon.
        Source: unix(7) SCM_RIGHTS, preadv2(2).
        """
        deadline, options = self._begin(deadline_s, opts)
        keys = keys_of(items, "LLGetItemOpt")
        if len(buffers) != len(keys):
            raise ValueError(f"{len(keys)} items need as many buffers, not {len(buffers)}")
        get = self._get(keys, check_targets(buffers), deadline, options)
        return list(map(LLGetIntoResult, get.statuses, _sizes(get), keys))

    def ll_batch_put(
        self, items: Sequence[LLPutItem], deadline_s: float | None = None, opts: LLBatchOptions | None = None
    ) -> list[LLPutResult]:
        """Store values; each becomes visible at once and whole.

        Returns:
            results in the order of `items`; status 0, or -errno. What the world does is a status, never raised.
        Raises:
            ValueError: a value whose memory can't be used, before any byte moves.
        """
        deadline, options = self._begin(deadline_s, opts)
        items = list(items)
        keys = keys_of(items, "LLPutItem")
        if not all(isinstance(item, LLPutItem) for item in items):
            raise TypeError("items must be a sequence of LLPutItem")
        sources = [check_source(item.value, "value") for item in items]
        put = Put(self._core, keys, sources, deadline, options.mountpoint_index, options.if_exists)
        with self._call("put", put.statuses, put.sizes):
            put.run()
        return [LLPutResult(status, "", key) for status, key in zip(put.statuses, keys, strict=True)]

    def ll_batch_delete(
        self, keys: Sequence[str], deadline_s: float | None = None, opts: LLBatchOptions | None = None
    ) -> list[LLDeleteResult]:
        """Delete keys; 0, or -errno (-ENOENT: it held nothing). What the world does is a status, never raised."""
        deadline, options = self._begin(deadline_s, opts)
        keys = check_types(keys)
        statuses, index = check_keys(keys, self._core.max_key_size), options.mountpoint_index
        with self._call("delete", statuses, ()):
            try:
                ask(self._core, keys, statuses, lambda id_, sent: wire.Delete(id_, index, sent), deadline)
            except KvcsError as exc:
                give_up(statuses, -exc.errno)
        return list(map(LLDeleteResult, statuses, keys))

    # -- the rest

    def get_metrics(self) -> dict[str, Any]:
        """Counts and latencies (in seconds) by op: put, get, delete, exists."""
        meter = self._core.meter if self._metrics_on else None
        return {"enabled": False, "ops": {}} if meter is None else {"enabled": True, "ops": meter.as_dict()}

    def get_metrics_text(self) -> str:
        """The same in the text format of Prometheus; "" unless the client was made with `enable_metrics`."""
        meter = self._core.meter if self._metrics_on else None
        return "" if meter is None else meter.text()

    def close(self) -> None:
        """End the connection and the workers; calls under way fail. Takes at most 5 s, and may be called again."""
        self._end()
        deadline = Deadline(CLOSE_SECONDS)
        for pool in self._pools:
            pool.join(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self, deadline_s: float | None, opts: LLBatchOptions | None
    ) -> tuple[Deadline, LLBatchOptions]:
        self._core.channel.check_open()
        seconds = self._default_seconds if deadline_s is None else check_seconds("deadline_s", deadline_s)
        if opts is None:
            return Deadline(seconds), _DEFAULTS
        if not isinstance(opts, LLBatchOptions):
            raise TypeError(f"opts must be an LLBatchOptions, not {type(opts).__name__}")
        return Deadline(seconds), opts

    def _get(
        self, keys: list[str], targets: list[Any] | None, deadline: Deadline, options: LLBatchOptions
    ) -> Get:
        renew = options.renew is not False
        get = Get(self._core, keys, targets, deadline, options.mountpoint_index, renew)
        with self._call("get", get.statuses, get.statuses):
            get.run()
        return get

    @contextlib.contextmanager
    def _call(self, op: str, statuses: Sequence[int], sizes: Sequence[int]) -> Iterator[None]:
        """Count a call where metrics are on, and name it in what it raises."""
        meter = self._core.meter
        try:
            with _NOTHING if meter is None else meter.batch(op, statuses, sizes):
                yield
        except KvcsError as exc:
            exc.op = op
            raise

    def _forget(self) -> None:
        self._end.detach()
        self._pools = ()
        self._core.channel.forget()


def _sizes(get: Get) -> list[int]:
    statuses, needed = get.statuses, get.needed
    if not statuses or min(statuses) > 0:
        return statuses
    return [status if status > 0 else needed.get(i, 0) for i, status in enumerate(statuses)]


def _end(channel: Channel, pools: Sequence[Pool], reporter: Reporter | None) -> None:
    """End everything without waiting, when a client is closed or collected."""
    if reporter is not None:
        reporter.close()
    channel.close()
    for pool in pools:
        pool.close()
