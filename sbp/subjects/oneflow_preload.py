"""Loads OneFlow's library into a process without joining any world, so that processes forked from it need not.

``import oneflow`` makes a world of ranks, and threads, at once: after that a process cannot be forked. The library
itself (300 MB, most of the import's time) can be loaded before.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_NAME = "oneflow._oneflow_internal"


class _Loaded(importlib.abc.Loader):
    """Gives out a module that has been loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: ModuleType, origin: str | None) -> None:
        self.module, self.origin = module, origin

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        return ModuleSpec(fullname, _Loaded(self.module), origin=self.origin)


def load() -> None:
    """Load the library. Raises ImportError where OneFlow is not installed or a library is missing."""
    package = PathFinder.find_spec("oneflow")
    if package is None or package.submodule_search_locations is None:
        raise ImportError(f"OneFlow is not installed for {sys.executable}")
    spec = PathFinder.find_spec(_NAME, list(package.submodule_search_locations))
    if spec is None or spec.loader is None:
        raise ImportError(f"{package.submodule_search_locations} holds no library")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[_NAME]
    sys.meta_path.insert(0, _Finder(module, spec.origin))


# What oneflow imports besides itself.
import google.protobuf.descriptor  # noqa: E402
import google.protobuf.message  # noqa: E402
import google.protobuf.reflection  # noqa: E402
import google.protobuf.symbol_database  # noqa: E402
import google.protobuf.text_format  # noqa: E402, F401
import numpy.random  # noqa: E402, F401
import tqdm.auto  # noqa: E402, F401

load()
