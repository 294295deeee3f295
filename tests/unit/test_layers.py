"""The layers: which module may import which. Checked over the source, so that no import has to run."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Third-party and system modules that only some layers may touch; any other outside module is free.
RESTRICTED = ("pyfuse3", "trio", "socket", "sortedcontainers", "msgspec", "prometheus_client", "xxhash")
# What comes with `pip install kvcsfs` alone, without the extra `daemon`.
BASE = ("msgspec", "prometheus_client", "socket", "xxhash")


@dataclass(frozen=True)
class Layer:
    """Modules below `name` may import of ours only what is below `ours`, and of RESTRICTED only `outside`."""

    name: str
    ours: tuple[str, ...]
    outside: tuple[str, ...] = ()


# The longest matching name decides, as a package's one special module may do more than the package.
LAYERS = (
    Layer("kvcs", ("kvcsfs.sdk",)),
    Layer("kvcsfs", ()),
    Layer("kvcsfs.errors", ()),
    Layer("kvcsfs.config", ("kvcsfs.errors",)),
    Layer("kvcsfs.wire", ("kvcsfs.errors",), ("msgspec",)),
    Layer(
        "kvcsfs.engine",
        ("kvcsfs.engine", "kvcsfs.errors", "kvcsfs.config"),
        ("sortedcontainers", "msgspec", "xxhash"),
    ),
    # The asynchronous face of the engine, and what waits or has tasks below it; no other needs trio.
    *(
        Layer(
            name,
            ("kvcsfs.engine", "kvcsfs.errors", "kvcsfs.config"),
            ("trio", "sortedcontainers", "msgspec", "xxhash"),
        )
        for name in (
            "kvcsfs.engine.engine",
            "kvcsfs.engine.volumes",
            "kvcsfs.engine.volume",
            "kvcsfs.engine.room",
            "kvcsfs.engine.upkeep",
            "kvcsfs.engine.lane",
            "kvcsfs.engine.scrub",
        )
    ),
    Layer("kvcsfs.locks", (), ("trio",)),
    Layer("kvcsfs.mounts", ("kvcsfs.errors",)),
    Layer(
        "kvcsfs.fuse",
        ("kvcsfs.fuse", "kvcsfs.engine", "kvcsfs.locks", "kvcsfs.mounts", "kvcsfs.config", "kvcsfs.errors"),
        ("pyfuse3", "trio", "xxhash"),
    ),
    Layer(
        "kvcsfs.batch",
        ("kvcsfs.batch", "kvcsfs.engine", "kvcsfs.locks", "kvcsfs.wire", "kvcsfs.errors"),
        ("trio", "socket"),
    ),
    Layer(
        "kvcsfs.daemon",
        ("kvcsfs.batch", "kvcsfs.fuse", "kvcsfs.engine", "kvcsfs.config", "kvcsfs.errors", "kvcsfs.wire"),
        ("pyfuse3", "trio", "socket", "prometheus_client"),
    ),
    Layer("kvcsfs.progress", ()),
    Layer("kvcsfs.verify", ("kvcsfs.control", "kvcsfs.progress", "kvcsfs.wire")),
    Layer("kvcsfs.fsck", ("kvcsfs.engine", "kvcsfs.progress", "kvcsfs.errors")),
    Layer("kvcsfs.control", ("kvcsfs.wire", "kvcsfs.config", "kvcsfs.errors"), ("socket",)),
    Layer(
        "kvcsfs.cli",
        (
            "kvcsfs.daemon",
            "kvcsfs.control",
            "kvcsfs.mounts",
            "kvcsfs.verify",
            "kvcsfs.fsck",
            "kvcsfs.config",
            "kvcsfs.errors",
            "kvcsfs.size",
            "kvcsfs.wire",
        ),
        ("msgspec", "socket"),
    ),
    Layer("kvcsfs.sdk", ("kvcsfs.sdk", "kvcsfs.wire", "kvcsfs.errors"), BASE),
    # Control and wire for the one thing that the SDK has no call for: deleting all that is below a prefix.
    Layer(
        "kvcsfs.connectors",
        ("kvcsfs.connectors", "kvcsfs.sdk", "kvcsfs.control", "kvcsfs.wire", "kvcsfs.errors", "kvcs"),
    ),
    Layer("kvcsfs.size", ()),
    Layer(
        "kvcsfs.bench",
        ("kvcsfs.bench", "kvcsfs.progress", "kvcsfs.sdk", "kvcsfs.config", "kvcsfs.errors", "kvcs"),
        BASE,
    ),
)


def covers(prefix: str, module: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> Layer | None:
    fitting = [layer for layer in LAYERS if covers(layer.name, module)]
    # The package `kvcsfs` itself holds the version alone: a new module needs a layer of its own.
    fitting = [layer for layer in fitting if layer.name != "kvcsfs" or module == "kvcsfs"]
    return max(fitting, key=lambda layer: len(layer.name), default=None)


def imports_of(module: str, source: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import, also inside functions; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = parts[: len(parts) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def complaint(module: str, layer: Layer, imported: str) -> str | None:
    top = imported.partition(".")[0]
    if top in ("kvcs", "kvcsfs"):
        # The bare package holds the version alone; `from kvcsfs import errors` is read as `kvcsfs.errors`.
        bare = imported in ("kvcsfs", "kvcsfs.__version__") and layer.name != "kvcs"
        if bare or any(covers(allowed, imported) for allowed in layer.ours):
            return None
        return f"{layer.name} may import of ours only {', '.join(layer.ours) or 'nothing'}"
    if top in RESTRICTED and top not in layer.outside:
        return f"{layer.name} may not import {top}"
    return None


def check_source(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Complaints about one module, each `module:line: import: why`."""
    layer = layer_of(module)
    if layer is None:
        return [f"{module}: belongs to no layer; give it one in {Path(__file__).name}"]
    return [
        f"{module}:{line}: {imported}: {why}"
        for line, imported in imports_of(module, source, is_package=is_package)
        if (why := complaint(module, layer, imported))
    ]


def check_tree(root: Path) -> list[str]:
    """Complaints about every module of `kvcs` and `kvcsfs` below `root`."""
    found = []
    for path in sorted([*root.glob("kvcs/**/*.py"), *root.glob("kvcsfs/**/*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += check_source(module, path.read_text(encoding="utf-8"), is_package=is_package)
    return found


def test_this_source_tree_keeps_its_layers():
    assert (ROOT / "kvcsfs" / "__init__.py").is_file()
    assert check_tree(ROOT) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvcsfs.engine.index", "import pyfuse3"),
        ("kvcsfs.engine.store", "import socket"),
        ("kvcsfs.engine.store", "import trio"),
        ("kvcsfs.engine.engine", "from kvcsfs.wire import Query"),
        ("kvcsfs.engine.catalog", "from kvcsfs.fuse.posix import attributes"),
        ("kvcsfs.sdk.client", "from kvcsfs.engine.keys import split"),
        ("kvcsfs.sdk.client", "from kvcsfs import engine"),
        ("kvcsfs.sdk.client", "def late():\n    import trio.lowlevel"),
        ("kvcsfs.sdk.channel", "from pyfuse3 import FUSEError"),
        ("kvcsfs.errors", "from kvcsfs.config import Config"),
        ("kvcsfs.wire", "from kvcsfs.config import Config"),
        ("kvcsfs.wire", "import socket"),
        ("kvcsfs.config", "from kvcsfs.wire import Hello"),
        ("kvcsfs.fuse.operations", "from kvcsfs.batch import serve"),
        ("kvcsfs.fuse.operations", "from .. import batch"),
        ("kvcsfs.batch", "from kvcsfs.fuse import operations"),
        ("kvcsfs.batch", "import pyfuse3"),
        ("kvcsfs.connectors.sglang", "from kvcsfs.engine import engine"),
        ("kvcs", "from kvcsfs.errors import KvcsError"),
        ("kvcs", "import kvcsfs"),
        ("kvcsfs.novelty", "import os"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str):
    assert len(check_source(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvcsfs.engine.engine", "import trio"),
        ("kvcsfs.engine.index", "from sortedcontainers import SortedDict\nfrom .keys import split"),
        ("kvcsfs.engine.index", "from kvcsfs import errors"),
        ("kvcsfs.fuse.operations", "import pyfuse3, trio\nfrom kvcsfs.engine.engine import Engine"),
        ("kvcsfs.batch", "import socket\nfrom kvcsfs import wire"),
        ("kvcsfs.sdk.client", "from . import channel\nfrom kvcsfs.wire import Hello\nimport socket"),
        ("kvcsfs.cli", "def serve():\n    from kvcsfs import daemon\nfrom kvcsfs import __version__"),
        ("kvcs", "from kvcsfs.sdk import KvcsLowLevelClient"),
    ],
)
def test_a_permitted_import_passes(module: str, source: str):
    assert check_source(module, source) == []


def test_a_violation_in_a_tree_names_module_line_and_reason(tmp_path: Path):
    package = tmp_path / "kvcsfs" / "sdk"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .client import KvcsLowLevelClient\n")
    (package / "client.py").write_text("import os\n\nfrom ..engine import engine\n")
    why = "kvcsfs.sdk may import of ours only kvcsfs.sdk, kvcsfs.wire, kvcsfs.errors"
    assert check_tree(tmp_path) == [f"kvcsfs.sdk.client:3: kvcsfs.engine.engine: {why}"]


# `import kvcs` has a budget of 100 ms (docs/sdk.md says how to measure it). The clock is not asserted, as it would
# fail on a busy machine; that the expensive modules stay out is.
@pytest.mark.parametrize("absent", ["asyncio", "trio", "pyfuse3", "sortedcontainers", "prometheus_client"])
def test_importing_the_sdk_stays_light(absent: str):
    script = f"import sys, kvcs; raise SystemExit({absent!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or f"`import kvcs` imports {absent}"
