"""One frozen Config: each setting is declared once and checked once, from the file and from flags alike."""

from __future__ import annotations

import dataclasses
import grp
import os
import pwd
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcsfs.errors import ConfigError

DEFAULT_SOCKET = "/var/run/kvcs/efc-grpc.sock"
MIN_CAPACITY = 1 << 20
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str | int) -> int:
    """Bytes of "100GiB", "4096" or 4096. Raises ValueError with what would be right."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*(KiB|MiB|GiB|TiB|)\s*", str(text))
    if not match or (isinstance(text, bool)):
        raise ValueError(f'expected a size such as "100GiB" or plain bytes, not {text!r}')
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def format_size(size: float) -> str:
    """A size for people: the largest unit of which there is at least one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"


@dataclasses.dataclass(frozen=True)
class MountpointConfig:
    """One backing directory. Sizes in bytes; watermarks as a share of the capacity that is kept free.

    `capacity`: bytes, or a share of the file system ("80%") that is resolved when the configuration is read.
    Background eviction starts when less than `low_watermark` is free and stops at `high_watermark`.
    """

    path: Path
    capacity: int
    low_watermark: float = 0.005
    high_watermark: float = 0.01
    io: str = "buffered"  # or "direct"
    durability: str = "none"  # or "fsync": what is acknowledged survives a power loss
    scrub_rate: int = 64 << 20  # bytes a second that the background verification reads at most; 0: none


@dataclasses.dataclass(frozen=True)
class AccessRule:
    """What users and groups may do with the keys that start with `prefix`; `users` None is everyone."""

    prefix: str
    users: frozenset[int] | None
    groups: frozenset[int] = frozenset()
    read: bool = True
    write: bool = True


@dataclasses.dataclass(frozen=True)
class Permissions:
    """Who owns what lies below a prefix ("" for the whole mount) as long as nobody set it. -1: not given.

    `mode` is that of directories; files have it without the bits to search.
    """

    prefix: str = ""
    owner: int = -1
    group: int = -1
    mode: int = -1


@dataclasses.dataclass(frozen=True)
class Place:
    """A second place at which the mount, or one prefix of it, is to be seen."""

    path: Path
    prefix: str = ""
    read_only: bool = False


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole configuration of one daemon."""

    mountpoints: tuple[MountpointConfig, ...]
    socket: Path = Path(DEFAULT_SOCKET)
    socket_group: str = ""  # group that may connect; "" leaves the daemon's own
    mount: Path | None = None
    backend: str = "direct"  # or "pooled"
    metrics: str = ""  # address:port, "" for none
    mount_read_only: bool = False
    mount_xattrs: bool = False
    permissions: tuple[Permissions, ...] = ()
    places: tuple[Place, ...] = ()
    access: tuple[AccessRule, ...] = ()  # none: whoever may connect may do everything


def load(file: Path | None, flags: Mapping[str, str | None]) -> Config:
    """Read the file, let flags (`data`, `capacity`, `mount`, `socket`, `metrics`) override it, and check everything.

    Raises:
        ConfigError: one line that names the file, the key and what was expected.
    """
    source = str(file) if file else "command line"
    document = _read(file) if file else {}
    unknown = sorted(set(document) - {"store", "mountpoints", "access", "prefixes", "mounts"})
    if unknown:
        raise ConfigError(
            f"{source}: unknown key {unknown[0]!r}, expected [store], [[mountpoints]], [[access]], [[prefixes]] "
            "or [[mounts]]"
        )
    store = _table(source, "store", document.get("store", {}), _STORE_KEYS)
    tables = _tables(source, "mountpoints", document, _MOUNTPOINT_KEYS)
    rules = _tables(source, "access", document, _ACCESS_KEYS)
    for name in ("mount", "socket", "metrics"):
        if flags.get(name):
            store[name] = flags[name]
    if flags.get("data") or (flags.get("capacity") and not tables):
        tables = tables or [{}]
    for flag, name in (("data", "path"), ("capacity", "capacity")):
        if flags.get(flag):
            tables[0][name] = flags[flag]
    if not tables:
        raise ConfigError(
            f"{source}: no data directory; give --data DIR --capacity SIZE, or a [[mountpoints]] table"
        )
    mountpoints = tuple(_mountpoint(f"{source}: mountpoints[{i}]", t) for i, t in enumerate(tables))
    paths = [os.path.realpath(m.path) for m in mountpoints]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise ConfigError(f"{source}: mountpoints[{i}].path: {path} is used twice")
    access = tuple(_access(f"{source}: access[{i}]", rule) for i, rule in enumerate(rules))
    config = _store(f"{source}: store", store, mountpoints, access)
    prefixes = _tables(source, "prefixes", document, _PREFIX_KEYS)
    permissions = [_permissions(f"{source}: prefixes[{i}]", t) for i, t in enumerate(prefixes)]
    mounts = _tables(source, "mounts", document, _PLACE_KEYS)
    if mounts and config.mount is None:
        raise ConfigError(
            f"{source}: mounts: further places need a mount, expected store.mount (--mount DIR)"
        )
    return dataclasses.replace(
        config,
        permissions=(*config.permissions, *permissions),
        places=tuple(_place(f"{source}: mounts[{i}]", t) for i, t in enumerate(mounts)),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{file}: can't be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: not valid TOML: {exc}") from exc


_STORE_KEYS = frozenset(
    {"socket", "socket_group", "mount", "backend", "metrics"}
    | {"mount_owner", "mount_group", "mount_mode", "mount_read_only", "mount_xattrs"}
)
_PREFIX_KEYS = frozenset({"prefix", "owner", "group", "mode"})
_PLACE_KEYS = frozenset({"path", "prefix", "read_only"})
_MOUNTPOINT_KEYS = frozenset(
    {"path", "capacity", "low_watermark", "high_watermark", "io", "durability", "scrub_rate"}
)


_ACCESS_KEYS = frozenset({"prefix", "users", "groups", "read", "write"})


def _tables(
    source: str, name: str, document: Mapping[str, Any], known: frozenset[str]
) -> list[dict[str, Any]]:
    raw = document.get(name, [])
    if not isinstance(raw, list):
        raise ConfigError(f"{source}: {name}: expected [[{name}]] tables")
    return [_table(source, f"{name}[{i}]", table, known) for i, table in enumerate(raw)]


def _table(source: str, name: str, table: Any, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name}: expected a table")
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{source}: {name}.{key}: unknown key, expected one of {', '.join(sorted(known))}"
            )
    return dict(table)


def _store(
    where: str,
    table: dict[str, Any],
    mountpoints: tuple[MountpointConfig, ...],
    access: tuple[AccessRule, ...],
) -> Config:
    backend = _choice(where, "backend", table.get("backend", "direct"), ("direct", "pooled"))
    socket = _text(where, "socket", table.get("socket", DEFAULT_SOCKET))
    if len(os.fsencode(os.path.abspath(socket))) > 107:  # sun_path, unix(7)
        raise ConfigError(f"{where}.socket: {socket} is too long, a socket path has at most 107 bytes")
    mount = table.get("mount")
    metrics = table.get("metrics", "")
    if metrics:
        _address(where, _text(where, "metrics", metrics))
    return Config(
        mountpoints=mountpoints,
        socket=Path(os.path.abspath(socket)),
        socket_group=_text(where, "socket_group", table["socket_group"]) if "socket_group" in table else "",
        mount=Path(os.path.abspath(_text(where, "mount", mount))) if mount is not None else None,
        backend=backend,
        metrics=metrics,
        mount_read_only=_bool(where, "mount_read_only", table.get("mount_read_only", False)),
        mount_xattrs=_bool(where, "mount_xattrs", table.get("mount_xattrs", False)),
        permissions=tuple(p for p in [_owned(where, "mount_", "", table)] if p != Permissions()),
        access=access,
    )


def _access(where: str, table: dict[str, Any]) -> AccessRule:
    prefix = table.get("prefix")
    if not isinstance(prefix, str) or (prefix and not prefix.endswith("/")) or "\0" in prefix:
        raise ConfigError(
            f'{where}.prefix: {prefix!r}: expected a text that ends with "/", or "" for every key'
        )
    if not {"users", "groups"} & set(table):
        raise ConfigError(
            f'{where}: expected users or groups, such as users = ["alice", 1001], or ["*"] for everyone'
        )
    users = _ids(where, "users", table.get("users", []), _uid)
    groups = _ids(where, "groups", table.get("groups", []), _gid)
    if groups is None:
        raise ConfigError(f"{where}.groups: '*' is for users, expected names or numbers of groups")
    rights = {name: table.get(name, True) for name in ("read", "write")}
    for name, value in rights.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{where}.{name}: {value!r}: expected true or false")
    return AccessRule(prefix, users, groups, **rights)


def _uid(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _gid(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def _ids(where: str, key: str, value: Any, resolve: Callable[[str], int]) -> frozenset[int] | None:
    """The numbers of users or groups; None for everyone."""
    if value == ["*"]:
        return None
    if not isinstance(value, list):
        raise ConfigError(f"{where}.{key}: {value!r}: expected a list of names or numbers")
    found = set()
    for item in value:
        if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 32:
            found.add(item)
            continue
        try:
            found.add(resolve(item))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{where}.{key}: {item!r} isn't known here, expected a name or a number"
            ) from None
    return frozenset(found)


def _permissions(where: str, table: dict[str, Any]) -> Permissions:
    return _owned(where, "", _prefix(where, table.get("prefix")), table)


def _owned(where: str, before: str, prefix: str, table: dict[str, Any]) -> Permissions:
    owner, group, mode = (table.get(before + name, -1) for name in ("owner", "group", "mode"))
    return Permissions(
        prefix,
        owner if owner == -1 else _id(where, before + "owner", owner, _uid),
        group if group == -1 else _id(where, before + "group", group, _gid),
        mode if mode == -1 else _mode(where, before + "mode", mode),
    )


def _id(where: str, key: str, value: Any, resolve: Callable[[str], int]) -> int:
    (found,) = _ids(where, key, [value], resolve) or (-1,)
    return found


def _place(where: str, table: dict[str, Any]) -> Place:
    return Place(
        path=Path(os.path.abspath(_text(where, "path", table.get("path")))),
        prefix=_prefix(where, table["prefix"]) if "prefix" in table else "",
        read_only=_bool(where, "read_only", table.get("read_only", False)),
    )


def _prefix(where: str, value: Any) -> str:
    """The first component of keys, as it is written on the mount."""
    prefix = _text(where, "prefix", value).removesuffix("/")
    if "/" in prefix or prefix in ("", ".", ".."):
        raise ConfigError(f"{where}.prefix: {value!r}: expected the first component of keys, without a slash")
    return prefix


def _mode(where: str, key: str, value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"[0-7]{3,4}", value):
        raise ConfigError(f'{where}.{key}: {value!r}: expected the octal mode of directories, such as "0750"')
    return int(value, 8)


def _bool(where: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}.{key}: {value!r}: expected true or false")
    return value


def _mountpoint(where: str, table: dict[str, Any]) -> MountpointConfig:
    if "path" not in table:
        raise ConfigError(f"{where}.path: missing, expected the backing directory (--data DIR)")
    path = Path(os.path.abspath(_text(where, "path", table["path"])))
    if not os.path.isdir(path):  # unlike Path.is_dir it never raises
        raise ConfigError(f"{where}.path: {path} is not a directory, expected one that exists")
    if "capacity" not in table:
        raise ConfigError(f'{where}.capacity: missing, expected a size such as "100GiB" (--capacity SIZE)')
    low = _share(where, "low_watermark", table.get("low_watermark", MountpointConfig.low_watermark))
    high = _share(where, "high_watermark", table.get("high_watermark", MountpointConfig.high_watermark))
    if low > high:
        raise ConfigError(
            f"{where}.low_watermark: {low:.1%} is above high_watermark, {high:.1%}; expected it below"
        )
    return MountpointConfig(
        path=path,
        capacity=_capacity(where, path, table["capacity"]),
        low_watermark=low,
        high_watermark=high,
        io=_choice(where, "io", table.get("io", "buffered"), ("buffered", "direct")),
        durability=_choice(where, "durability", table.get("durability", "none"), ("none", "fsync")),
        scrub_rate=_size(where, "scrub_rate", table.get("scrub_rate", MountpointConfig.scrub_rate)),
    )


def _size(where: str, key: str, value: Any) -> int:
    try:
        return parse_size(value)
    except ValueError as exc:
        raise ConfigError(f"{where}.{key}: {exc}") from None


def _capacity(where: str, path: Path, value: Any) -> int:
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value) if isinstance(value, str) else None
    if percent:
        if not 0 < float(percent[1]) <= 100:
            raise ConfigError(f"{where}.capacity: {value!r}: expected more than 0% and at most 100%")
        stat = os.statvfs(path)
        size = int(stat.f_blocks * stat.f_frsize * float(percent[1]) / 100)
    else:
        size = _size(where, "capacity", value)
    if size < MIN_CAPACITY:
        raise ConfigError(f"{where}.capacity: {size} B is too small, expected at least 1MiB")
    return size


def _share(where: str, key: str, value: Any) -> float:
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value) if isinstance(value, str) else None
    if percent:
        share = float(percent[1]) / 100
    elif isinstance(value, int | float) and not isinstance(value, bool):
        share = value
    else:
        share = -1.0
    if not 0 <= share <= 0.5:
        raise ConfigError(f'{where}.{key}: {value!r}: expected a share of the capacity from "0%" to "50%"')
    return share


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{where}.{key}: {value!r}: expected a text that isn't empty")
    return value


def _choice(where: str, key: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{where}.{key}: {value!r}: expected {' or '.join(repr(c) for c in choices)}")
    return str(value)


def _address(where: str, value: str) -> None:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f'{where}.metrics: {value!r}: expected ADDR:PORT such as "127.0.0.1:9477"')
