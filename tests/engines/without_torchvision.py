"""Stands in for torchvision where it is not installed: parts of SGLang and vLLM import it for models that see.

Every name of it can be imported and none of them works. Imported for its effect, before the engine.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Nothing(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name  # enumerations such as InterpolationMode.BICUBIC


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has no content."""


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.insert(0, _Finder())
