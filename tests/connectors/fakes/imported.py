"""A connector, imported with small stand-ins in place of its engine's modules.

A stand-in has what the connectors use of the real module and nothing else. The real ones are used in tests/engines;
these let the connectors' own logic run where no engine is installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def connector(name: str, modules: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    """The module `kvcsfs.connectors.<name>`, imported with fake modules in place of its engine's."""
    full = f"kvcsfs.connectors.{name}"
    made: dict[str, ModuleType] = {}
    for path, contents in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):  # the packages that it lies in
            package = ".".join(parts[:end])
            made.setdefault(package, ModuleType(package))
        made[path].__dict__.update(contents)
    before = {module: sys.modules.pop(module, None) for module in (full, *made)}
    sys.modules.update(made)
    try:
        yield importlib.import_module(full)
    finally:
        for module, old in before.items():
            sys.modules.pop(module, None)
            if old is not None:
                sys.modules[module] = old
