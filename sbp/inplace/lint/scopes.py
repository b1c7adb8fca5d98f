"""The names, functions and classes of one file, as the flow analysis sees them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import NamedTuple

from sbp.inplace.lint.values import Value

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


# How a module is parallelised.
PARAMETERS, THROUGHOUT = 1, 2


class NameRef(NamedTuple):
    """Something imported or built in, by its full name: ``torch.nn.functional.relu``, ``builtins.len``."""

    dotted: str


class MethodRef(NamedTuple):
    """A method that is looked up on a value and not called yet: ``f = x.add_``."""

    receiver: Value
    name: str


class FunctionRef(NamedTuple):
    """A function of this file; ``receiver`` is what it is bound to; ``local`` if ``local_map`` calls it."""

    info: FunctionInfo
    receiver: Value | None = None
    local: bool = False


class ClassRef(NamedTuple):
    """A class of this file."""

    info: ClassInfo


class Instance(NamedTuple):
    """An object: of a class of this file (``info``) or of another (``dotted``).

    ``parallel`` is not 0 when the object is a module whose parameters are distributed tensors (or an optimizer of
    such parameters): PARAMETERS, or THROUGHOUT when its outputs are distributed too.
    """

    info: ClassInfo | None
    dotted: str
    parallel: int = 0


class SuperRef(NamedTuple):
    """``super()`` in a method of a class."""

    info: ClassInfo
    receiver: Value


@dataclass(eq=False)
class Frame:
    """The state of one function while its statements are followed."""

    names: dict[str, Value]
    context: int
    parent: Frame | None = None
    owner: ClassInfo | None = None
    receiver: Value | None = None
    returned: Value | None = None
    yielded: Value | None = None
    is_class: bool = False
    loops: int = 0
    outer_names: frozenset[str] = frozenset()
    walrus: dict[str, Value] = field(default_factory=dict)
    exits: list[tuple[dict[str, Value], bool]] = field(default_factory=list)
    paths: bool = False

    def bind_path(self, path: str, value: Value) -> None:
        """Remember a name, or an attribute of a name under ``name.attribute``."""
        self.names[path] = value
        self.paths = True


@dataclass(eq=False)
class FunctionInfo:
    """A function, method or lambda of this file; ``home`` is the frame in which it is defined."""

    node: FunctionNode
    name: str
    home: Frame
    owner: ClassInfo | None = None
    kind: str = "function"  # or "static", "class", "property"
    defaults: dict[str, Value] = field(default_factory=dict)
    results: dict[tuple[object, ...], Value] = field(default_factory=dict)
    running: set[tuple[object, ...]] = field(default_factory=set)
    escaped: bool = False


@dataclass(eq=False)
class ClassInfo:
    """A class of this file."""

    node: ast.ClassDef
    name: str
    home: Frame
    bases: tuple[Value, ...]
    methods: dict[str, FunctionInfo] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    prepared: bool = False
    module: bool | None = None

    def ancestors(self) -> list[ClassInfo]:
        """This class and the classes of this file that it derives from, nearest first."""
        found = [self]
        for info in found:
            for base in info.bases:
                for ref in base.refs:
                    if isinstance(ref, ClassRef) and ref.info not in found:
                        found.append(ref.info)
        return found

    def outside(self) -> list[str]:
        """The full names of the bases, its own and its ancestors', that are not classes of this file."""
        return [
            ref.dotted
            for info in self.ancestors()
            for base in info.bases
            for ref in base.refs
            if isinstance(ref, NameRef)
        ]

    def method(self, name: str, after: ClassInfo | None = None) -> FunctionInfo | None:
        """The method of that name, its own or inherited; with ``after``, the one that ``super()`` finds."""
        skipping = after is not None
        for info in self.ancestors():
            if skipping:
                skipping = info is not after
                continue
            if name in info.methods:
                return info.methods[name]
        return None
