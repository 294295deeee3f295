"""The `kvcsfs` command: arguments to the daemon, or to a request of the socket. One line on stderr for an error.

Exit status: 0 done, 1 failed (verify, fsck: something was wrong), 2 wrong arguments or configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvcsfs import __version__, wire
from kvcsfs.config import format_size, load, parse_size
from kvcsfs.control import Control, default_socket
from kvcsfs.errors import ConfigError, KvcsError
from kvcsfs.mounts import bind
from kvcsfs.size import Model


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvcsfs: {message}; see '{self.prog} --help'\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Keys are any text, which not every terminal's encoding has.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = arguments.run(arguments) or 0
        if sys.stdout is not None:  # `kvcsfs rm >&-`
            sys.stdout.flush()
        return status
    except ConfigError as exc:
        print(f"kvcsfs: {exc}", file=sys.stderr)
        return 2
    except KvcsError as exc:
        print(f"kvcsfs: {exc}", file=sys.stderr)
        return 1
    except OSError as exc:  # of stdout, all others are told as one of the above
        if not isinstance(exc, BrokenPipeError):  # `kvcsfs ls | head` has what it wants
            print(f"kvcsfs: {exc.strerror or exc}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvcsfs", description="A KV-cache store for large-model inference.")
    parser.add_argument("--version", action="version", version=f"kvcsfs {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon in the foreground")
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration; flags override it")
    serve.add_argument("--data", metavar="DIR", help="backing directory of mountpoint 0")
    serve.add_argument(
        "--capacity", metavar="SIZE", help='its capacity: "100GiB", bytes, or "80%%" of the file system'
    )
    serve.add_argument(
        "--mount", metavar="DIR", help="where to mount the store; without it only the socket is served"
    )
    serve.add_argument("--socket", metavar="PATH", help="socket of the batch face")
    serve.add_argument("--metrics", metavar="ADDR:PORT", help="serve Prometheus metrics")
    serve.set_defaults(run=_serve)

    status = _command(commands, "status", "show what the daemon holds and does", _status)
    status.add_argument("--json", action="store_true", help="print JSON")

    usage = _command(commands, "usage", "entries and bytes below a prefix", _usage)
    usage.add_argument("prefix", nargs="?", default="", metavar="PREFIX")
    usage.add_argument("--json", action="store_true", help="print JSON")

    ls = _command(commands, "ls", "list keys, a line each", _ls)
    ls.add_argument("prefix", nargs="?", default="", metavar="PREFIX")
    ls.add_argument("--json", action="store_true", help="print one JSON object a line")

    rm = _command(commands, "rm", "delete keys", _rm)
    rm.add_argument("keys", nargs="*", metavar="KEY")
    rm.add_argument("--prefix", metavar="PREFIX", help="delete every key that starts with PREFIX")

    evict = _command(commands, "evict", "evict the least recently used entries", _evict)
    evict.add_argument("prefix", nargs="?", default="", metavar="PREFIX")
    evict.add_argument(
        "--bytes", type=_size, metavar="SIZE", help="how much to free; without it all below PREFIX"
    )
    evict.add_argument("--all", action="store_true", help="needed to evict everything")

    mount = _command(commands, "mount", "show the daemon's mount at a second place", _mount)
    mount.add_argument("path", type=Path, metavar="DIR", help="where; `umount DIR` takes it away again")
    mount.add_argument(
        "--prefix", default="", metavar="PREFIX", help="only the keys below this first component"
    )
    mount.add_argument("--read-only", action="store_true", help="refuse every change there")

    verify = _command(
        commands, "verify", "read every value while the daemon serves; drop what is wrong", _verify
    )
    verify.set_defaults(mountpoint=None)
    verify.add_argument("--after", metavar="KEY", help="go on after KEY, where an earlier run was stopped")
    _verification(verify, "256MiB")

    fsck = commands.add_parser("fsck", help="verify a store that no daemon serves; drop what is wrong")
    fsck.add_argument("directory", type=Path, metavar="DIR", help="a mountpoint's backing directory")
    _verification(fsck, "0")
    fsck.set_defaults(run=_fsck)

    _add_size(commands)
    return parser


def _verification(parser: argparse.ArgumentParser, rate: str) -> None:
    parser.add_argument(
        "--rate",
        type=_size,
        default=rate,
        metavar="SIZE",
        help=f"bytes a second at most; 0: no limit ({rate})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_size(commands: Any) -> None:
    text = "bytes of a model's KV cache, and the capacity that a number of tokens needs"
    size = commands.add_parser("size", help=text, description=text)
    size.add_argument("--layers", type=int, required=True, metavar="N")
    size.add_argument("--kv-heads", type=int, default=0, metavar="N", help="heads of keys and values")
    size.add_argument("--head-dim", type=int, default=0, metavar="N")
    size.add_argument("--value-head-dim", type=int, default=0, metavar="N", help="if values have another")
    size.add_argument(
        "--latent",
        type=int,
        default=0,
        metavar="N",
        help="MLA, without heads: kv_lora_rank + qk_rope_head_dim",
    )
    size.add_argument(
        "--dtype", default="bf16", metavar="NAME", help="bf16, fp16, fp32, fp8, ...; default bf16"
    )
    size.add_argument("--ranks", type=int, default=1, metavar="N", help="workers that split the heads")
    size.add_argument(
        "--block-tokens", type=int, default=64, metavar="N", help="tokens of one value; default 64"
    )
    size.add_argument(
        "--tokens", type=int, default=1_000_000, metavar="N", help="tokens to keep; default 1000000"
    )
    size.add_argument("--capacity", type=_size, metavar="SIZE", help="say how many tokens it keeps instead")
    size.add_argument("--json", action="store_true", help="print JSON")
    size.set_defaults(run=_size_model)


def _command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("--socket", metavar="PATH", default=default_socket(), help="the daemon's socket")
    command.add_argument(
        "--mountpoint", type=int, default=0, metavar="N", help="mountpoint index (pooled backend)"
    )
    command.set_defaults(run=run)
    return command


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _serve(arguments: argparse.Namespace) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    flags = {name: getattr(arguments, name) for name in ("data", "capacity", "mount", "socket", "metrics")}
    try:
        from kvcsfs.daemon import run  # the SDK's install has no trio
    except ModuleNotFoundError as exc:
        raise _not_installed(exc) from exc
    run(functools.partial(load, arguments.config, flags))


def _status(arguments: argparse.Namespace) -> None:
    with Control(arguments.socket) as control:
        status = control.ask(wire.Status(2), wire.StatusReply).status
    if arguments.json:
        print(json.dumps(status, indent=2))
        return
    print(f"kvcsfs {status['version']}, up {status['uptime_seconds']:.0f} s, {status['sessions']} sessions")
    for m in status["mountpoints"]:
        print(f"mountpoint {m['index']}: {m['path']} ({m['state']})")
        if m["trouble"]:
            print(f"  in trouble: {m['trouble']}")
        if m["state"] == "recovering":
            print(f"  recovering: {m['recovered_share']:.0%}, {m['recovered_entries']} entries read")
        print(
            f"  {m['entries']} entries, {format_size(m['used_bytes'])} of {format_size(m['capacity_bytes'])} used"
        )
        parts = ("committed", "reserved", "retired", "free_slot")
        print("  " + ", ".join(f"{p.replace('_', ' ')} {format_size(m[p + '_bytes'])}" for p in parts))
        counters = ("hits", "misses", "puts", "deletes", "evictions", "checksum_errors", "io_errors")
        print("  " + ", ".join(f"{m[c]} {c.replace('_', ' ')}" for c in counters))
        if m["scrub_done_bytes"] < m["scrub_total_bytes"]:
            share = m["scrub_done_bytes"] / m["scrub_total_bytes"]
            print(f"  verifying after an unclean stop: {share:.0%} of {format_size(m['scrub_total_bytes'])}")


def _usage(arguments: argparse.Namespace) -> None:
    with Control(arguments.socket) as control:
        usage = control.ask(wire.Usage(2, arguments.mountpoint, arguments.prefix), wire.UsageReply)
    if arguments.json:
        figures = {
            "entries": usage.entries,
            "value_bytes": usage.value_bytes,
            "charged_bytes": usage.charged_bytes,
        }
        print(json.dumps({"prefix": arguments.prefix, **figures}))
    else:
        print(
            f"{usage.entries} entries, {format_size(usage.value_bytes)} of values, "
            f"{format_size(usage.charged_bytes)} with padding and footers"
        )


def _pages(control: Control, mountpoint: int, prefix: str) -> Iterator[wire.ListedEntry]:
    after, more = "", True
    while more:
        reply = control.ask(wire.List(2, mountpoint, prefix, after, wire.MAX_KEYS), wire.ListReply)
        yield from reply.entries
        more = reply.more
        after = reply.entries[-1].key if reply.entries else ""


def _ls(arguments: argparse.Namespace) -> None:
    with Control(arguments.socket) as control:
        for e in _pages(control, arguments.mountpoint, arguments.prefix):
            if arguments.json:
                row = {"key": e.key, "size": e.size, "created": e.created, "checksum": e.checksum.hex()}
                print(json.dumps(row))
            else:
                created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e.created))
                print(f"{e.size:>14} {created} {_printable(e.key)}")


def _printable(key: str) -> str:
    return key if key.isprintable() else key.encode("unicode_escape").decode()


def _rm(arguments: argparse.Namespace) -> None:
    if bool(arguments.keys) == bool(arguments.prefix):
        raise ConfigError("rm: expected keys, or --prefix PREFIX")
    with Control(arguments.socket) as control:
        if arguments.prefix:
            reply = control.ask(wire.Remove(2, arguments.mountpoint, arguments.prefix), wire.EvictReply)
            print(f"deleted {reply.entries} entries, {format_size(reply.charged_bytes)}")
            return
        failed: list[tuple[str, int]] = []
        for start in range(0, len(arguments.keys), wire.MAX_KEYS):
            keys = arguments.keys[start : start + wire.MAX_KEYS]
            statuses = control.ask(wire.Delete(2, arguments.mountpoint, keys), wire.DeleteReply).statuses
            failed += [(key, status) for key, status in zip(keys, statuses, strict=True) if status]
    if failed:
        key, status = failed[0]
        why = "no value under" if status == -errno.ENOENT else f"{os.strerror(-status)}:"
        raise KvcsError(f"rm: {why} {_printable(key)}" + f" and {len(failed) - 1} others" * (len(failed) > 1))


def _verify(arguments: argparse.Namespace) -> int:
    from kvcsfs.verify import verify

    with Control(arguments.socket) as control:
        points = [m.index for m in control.hello.mountpoints] if control.hello.backend == "pooled" else [0]
        if arguments.mountpoint is not None or arguments.after:
            points = [arguments.mountpoint or 0]
        results = [verify(control, i, arguments.after or "", arguments.rate) for i in points]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(r) for r in results]))
    else:
        for r in results:
            _tell(f"mountpoint {r.mountpoint}", r.entries, r.bytes, r.dropped)
    return int(any(r.dropped for r in results))


def _fsck(arguments: argparse.Namespace) -> int:
    try:
        from kvcsfs.fsck import fsck  # the SDK's install has no engine
    except ModuleNotFoundError as exc:
        raise _not_installed(exc) from exc
    result = fsck(arguments.directory, arguments.rate)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result)))
    else:
        _tell(result.path, result.entries, result.bytes, result.dropped)
        print(f"  {result.leftovers} files of no value removed")
    return int(bool(result.dropped))


def _tell(what: str, entries: int, size: int, dropped: Sequence[str]) -> None:
    print(f"{what}: {entries} entries, {format_size(size)} read, {len(dropped)} dropped")
    for key in dropped:
        print(f"  dropped {_printable(key)}")


def _not_installed(exc: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"the daemon needs {exc.name}; install it with: pip install 'kvcsfs[daemon]'")


def _evict(arguments: argparse.Namespace) -> None:
    if arguments.bytes == 0:
        raise ConfigError("evict: --bytes 0: expected at least 1 byte")
    if not (arguments.prefix or arguments.bytes or arguments.all):
        raise ConfigError("evict: expected PREFIX, --bytes SIZE or --all")
    with Control(arguments.socket) as control:
        request = wire.Evict(2, arguments.mountpoint, arguments.prefix, arguments.bytes or 0)
        reply = control.ask(request, wire.EvictReply)
    print(f"evicted {reply.entries} entries, {format_size(reply.charged_bytes)}")


def _mount(arguments: argparse.Namespace) -> None:
    prefix = arguments.prefix.removesuffix("/")
    if "/" in prefix or prefix in (".", ".."):
        raise ConfigError(f"mount: --prefix {arguments.prefix}: expected the first component of keys")
    with Control(arguments.socket) as control:
        status = control.ask(wire.Status(2), wire.StatusReply).status
    if status["mount"] is None:
        raise KvcsError(f"mount: the daemon at {arguments.socket} has no mount; start it with --mount DIR")
    bind(Path(status["mount"]), prefix, arguments.path.absolute(), arguments.read_only)


def _size_model(arguments: argparse.Namespace) -> None:
    try:
        model = Model(
            arguments.layers,
            arguments.kv_heads,
            arguments.head_dim,
            arguments.dtype,
            arguments.value_head_dim,
            arguments.latent,
            arguments.ranks,
        )
        block, capacity = arguments.block_tokens, arguments.capacity
        figures = {
            "token_bytes": model.token_bytes,
            "value_bytes": model.value_bytes(block),
            "charged_bytes": model.charged_bytes(block),
            "tokens": arguments.tokens if capacity is None else model.tokens(capacity, block),
            "capacity_bytes": model.capacity(arguments.tokens, block) if capacity is None else capacity,
        }
    except ValueError as exc:
        raise ConfigError(f"size: {exc}") from None
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"a token: {format_size(figures['token_bytes'])}")
    print(
        f"a value of {block} tokens: {format_size(figures['value_bytes'])} on each of {model.stored_ranks} ranks, "
        f"{format_size(figures['charged_bytes'])} in all with padding and footers"
    )
    print(f"{figures['tokens']} tokens: a capacity of {format_size(figures['capacity_bytes'])}")


if __name__ == "__main__":
    sys.exit(main())
