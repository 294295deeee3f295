"""The environment file of a benchmark: which nodes, which client, which values. See docs/benchmarking.md."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvcs import KvcsLowLevelClient
from kvcsfs.config import parse_size
from kvcsfs.errors import ConfigError

Size = Annotated[int, Meta(ge=1)] | str
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
WorkerCount = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]

# Room for what is appended to the prefix, within the SDK's default limit of 256 bytes a key.
MAX_PREFIX_BYTES = 160


class Node(Struct, frozen=True, forbid_unknown_fields=True):
    """One store to load: a daemon's socket on this host. Without `socket`, the SDK's own default."""

    host: str = "localhost"
    socket: str | None = None


class ClientSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Keyword arguments of KvcsLowLevelClient; a worker count of 0 follows --workers."""

    max_keys_per_batch: int = 0
    max_value_size: int = 0
    max_key_size: int = 0
    get_workers: WorkerCount = 0
    set_workers: WorkerCount = 0
    simple_workers: WorkerCount = 0
    default_deadline_s: float = 30.0
    connect_timeout_s: float = 5.0
    verify_reads: bool = True


class SizeShare(Struct, frozen=True, forbid_unknown_fields=True):
    """One size of a distribution, and its share of the keys (weights; they need not add up to 1)."""

    size: Size
    share: Annotated[float, Meta(gt=0, le=1e9)]


class Environment(Struct, frozen=True, forbid_unknown_fields=True):
    """What a benchmark runs on and with. Times in seconds, sizes as in the configuration ("4MiB")."""

    nodes: Annotated[list[Node], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [Node()])
    client: ClientSettings = ClientSettings()
    value_size: Size | Annotated[list[SizeShare], Meta(min_length=1)] = "1MiB"
    keys: Count = 1024
    key_prefix: str = "kvcs-bench"
    warm_up_s: Seconds = 1.0
    duration_s: Annotated[float, Meta(gt=0)] = 5.0
    read_share: Share = 0.8
    concurrency: WorkerCount = 0
    buffer_memory: Size = "4GiB"

    @property
    def sizes(self) -> list[tuple[int, float]]:
        """The value sizes in bytes, each with its weight."""
        if isinstance(self.value_size, list):
            return [(parse_size(entry.size), entry.share) for entry in self.value_size]
        return [(parse_size(self.value_size), 1.0)]


def load_environment(file: Path | None) -> Environment:
    """Read and check an environment file; None for the defaults.

    Raises:
        ConfigError: one line that names the file, the field and what was expected.
    """
    if file is None:
        return Environment()
    try:
        environment = msgspec.json.decode(file.read_bytes(), type=Environment)
    except OSError as exc:
        raise ConfigError(f"{file}: can't be read: {exc.strerror}") from exc
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{file}: {_plain(str(exc))}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: not valid JSON: {exc}") from exc
    _check(str(file), environment)
    return environment


def _plain(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.keys`" as "keys: expected int, got str"."""
    match = re.fullmatch(r"(.*?) - at `\$\.?(.*)`", message)
    text, field = (match[1], match[2]) if match else (message, "")
    text = text.replace("`", "")
    return f"{field}: {text[0].lower()}{text[1:]}" if field else f"{text[0].lower()}{text[1:]}"


def _check(source: str, environment: Environment) -> None:
    sizes = {"buffer_memory": environment.buffer_memory}
    if isinstance(environment.value_size, list):
        sizes |= {f"value_size[{i}].size": e.size for i, e in enumerate(environment.value_size)}
    else:
        sizes["value_size"] = environment.value_size
    for field, size in sizes.items():
        try:
            positive = parse_size(size) > 0
        except ValueError as exc:
            raise ConfigError(f"{source}: {field}: {exc}") from None
        if not positive:
            raise ConfigError(f"{source}: {field}: expected more than 0 bytes")
    _check_prefix(source, environment.key_prefix)
    for i, node in enumerate(environment.nodes):
        _check_node(f"{source}: nodes[{i}]", node)


def _check_prefix(source: str, prefix: str) -> None:
    if not prefix or "\0" in prefix or prefix.startswith("/") or prefix.endswith("/"):
        raise ConfigError(
            f'{source}: key_prefix: expected a text such as "bench/a", without NUL, no "/" at its ends'
        )
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise ConfigError(f"{source}: key_prefix: expected at most {MAX_PREFIX_BYTES} bytes")


def _check_node(where: str, node: Node) -> None:
    if node.host not in {"localhost", "127.0.0.1", "::1", socket.gethostname()}:
        raise ConfigError(
            f"{where}.host: {node.host!r} is another machine, but a client reaches a store by a socket of "
            'its own host; expected "localhost" (run kvcs-bench on each host and add up the figures)'
        )
    if node.socket is not None and (
        not node.socket or len(os.fsencode(node.socket)) > 107
    ):  # sun_path, unix(7)
        raise ConfigError(f"{where}.socket: expected a path of 1 to 107 bytes")


def open_client(
    settings: ClientSettings, socket_path: str | None, workers: int, largest: int
) -> KvcsLowLevelClient:
    """A client of one node: `workers` where the settings leave a count open, room for values of `largest`.

    Raises:
        ConfigError: what the environment or the command line asks for is more than a client can be asked.
    """
    arguments = msgspec.structs.asdict(settings)
    for name in ("get_workers", "set_workers", "simple_workers"):
        arguments[name] = arguments[name] or workers
    arguments["max_value_size"] = arguments["max_value_size"] or largest
    if socket_path is not None:
        arguments["efc_socket"] = socket_path
    try:
        return KvcsLowLevelClient(**arguments)
    except ValueError as exc:
        raise ConfigError(f"client: {exc}") from None
