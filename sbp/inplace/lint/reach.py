"""Which functions of a file have to be followed: those whose text could hold a write, and those that lead to them.

All of this looks at the text with patterns that start with a fixed character, which Python searches for at memory
speed. It lets too much through, never too little: a function that is left out can give no finding.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from sbp.inplace.lint.knowledge import INPLACE_NAMES, last

# Every way to write to a tensor, but for item assignment, has one of these in its text. Matches in comments and
# strings cost time only. Fixed texts are found far faster than patterns, and patterns faster when they start with
# a fixed character.
AUGMENTED = re.compile(r"=(?:(?<=[-+*/%&|^]=)|(?<=<<=)|(?<=>>=))(?!=)")  # `@=` rebinds
UNDERSCORE = re.compile(
    r"_(?![A-Za-z0-9_])(?<=[A-Za-z0-9]_)"
)  # add_, _foreach_add_, an attribute that ends so
PATTERNS = (AUGMENTED, UNDERSCORE)
TEXTS = (
    ".data",
    "_local_tensor",
    "to_local",
    "__setitem__",
    "import operator",
    "operator.",
    "from operator",
    'data"',
    "data'",
)
AUGMENTED_METHOD = re.compile(r"__i(?:add|sub|mul|truediv|floordiv|mod|pow|lshift|rshift|and|x?or)__")
# x[i] = ..., also as one of several targets.
ITEM = re.compile(r"\]\s*(?:=(?!=)|,[^=()]{0,200}=(?!=)|,?\s*\)\s*=(?!=))")
# The line of an annotation, `x: list[int] = None`, or of a function's head.
ANNOTATION = re.compile(r"\s*(?:\*{0,2}[\w.]+\s*:|(?:async\s+)?def\s)")
BLOCK = re.compile(r"\s*(?:else|try|finally)\s*:")
# inplace=True by position: ReLU(True), F.relu(x, True).
POSITIONAL_TRUE = re.compile(r"True\s*[,)]")
POSITIONAL_CALL = re.compile(r"\b(?:" + "|".join(sorted({last(name) for name in INPLACE_NAMES})) + r")\s*\(")
POSITIONAL_REACH = 300


class Part(NamedTuple):
    """A function of the file, and the class that it is a method of."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: ast.ClassDef | None

    @property
    def lines(self) -> tuple[int, int]:
        """Its first and last line, decorators included."""
        decorators = self.node.decorator_list
        first = min(self.node.lineno, decorators[0].lineno) if decorators else self.node.lineno
        return first, self.node.end_lineno or self.node.lineno


def may_write(text: str) -> bool:
    """Whether a text holds any token that a write needs."""
    if any(pattern.search(text) for pattern in PATTERNS) or any(fixed in text for fixed in TEXTS):
        return True
    rest = (item_assignments, rare_offsets, positional_inplace)
    return any(next(iter(find(text)), None) is not None for find in rest)


def write_offsets(text: str) -> set[int]:
    """Where a text holds a token that a write needs."""
    offsets = {match.start() for pattern in PATTERNS for match in pattern.finditer(text)}
    for fixed in TEXTS:
        offsets.update(places(text, fixed))
    offsets.update(item_assignments(text))
    offsets.update(rare_offsets(text))
    offsets.update(positional_inplace(text))
    return offsets


def rare_offsets(text: str) -> Iterator[int]:
    """Where ``out=`` or ``inplace=`` is given, or ``__iadd__`` and its like are named."""
    for start in places(text, "__i"):
        if text[start + 3 : start + 6] != "nit" and AUGMENTED_METHOD.match(text, start):
            yield start
    for name in ("out", "inplace"):
        yield from keyword_offsets(text, name)


def keyword_offsets(text: str, name: str) -> Iterator[int]:
    """Where an argument is given by this name."""
    for fixed in (f"{name}=", f"{name} ="):
        for start in places(text, fixed):
            before = text[start - 1] if start else " "
            if not (before.isalnum() or before in "_."):
                yield start


def places(text: str, fixed: str) -> Iterator[int]:
    """Where a fixed text stands."""
    start = text.find(fixed)
    while start >= 0:
        yield start
        start = text.find(fixed, start + len(fixed))


def item_assignments(text: str) -> Iterator[int]:
    """Where items may be assigned: not the keys that are strings, since no tensor has such, nor annotations."""
    for match in ITEM.finditer(text):
        start = match.start()
        if text[start - 1] in "\"'":
            continue
        line = text[text.rfind("\n", 0, start) + 1 : start]
        if ANNOTATION.match(line) and not BLOCK.match(line):
            end = text.find("\n", start)
            head = text[start : end if end >= 0 else len(text)]
            # A body on the line of its head: `def f(x): x[0] = 1`.
            if not line.lstrip().startswith(("def ", "async ")) or head.rstrip().endswith((":", ",", "(")):
                continue
        if text[match.end() - 1 : match.end()] == "=" and match[0].lstrip("] \t\n") != "=":
            # One of several targets; an argument of a call looks alike.
            before = line.replace("==", "")
            if "=" in before or (before.count("(") > before.count(")") and before.lstrip()[:1] != "("):
                continue
        yield start


def positional_inplace(text: str) -> list[int]:
    """Where True is given by position to something that may take it as ``inplace``."""
    found = []
    for start in places(text, "True"):
        if text[start + 4 : start + 5] in (",", ")", " ", "\n") and text[start - 1] in " ,(\n":
            match = POSITIONAL_TRUE.match(text, start)
            if match and POSITIONAL_CALL.search(text, max(0, start - POSITIONAL_REACH), start):
                found.append(start)
    return found


def hands_out(text: str) -> list[int]:
    """Where modules are told to work in place, or hooks are handed to them: outside of forward() too."""
    return [*keyword_offsets(text, "inplace"), *places(text, "_hook("), *positional_inplace(text)]


class Reach:
    """The functions of one file that matter, by the identity of their nodes.

    ``wanted`` lead to a write; ``sourced`` may hold a distributed tensor, because one is made in them or in
    something that they mention; ``making`` make modules that work in place, or hand hooks to modules.
    """

    def __init__(self, tree: ast.Module, text: str, sources: Iterable[str]) -> None:
        self.text = text
        self.starts = list(accumulate((len(line) + 1 for line in text.split("\n")), initial=0))
        self.parts = sorted(functions_of(tree.body, None), key=lambda part: part.lines)
        self.first_lines = [part.lines[0] for part in self.parts]
        self.loose = list(loose_statements(tree.body, None))
        handed = set(hands_out(text))
        self.making = {id(part.node) for part in self.at(handed)}
        # A module that works in place writes where it is called, which no token of a write shows.
        self.wanted = self.closure(write_offsets(text)) | self.closure(handed, attributes=True)
        made = {offset for word in sources for offset in mentions(text, word)}
        self.sourced = self.closure(made, attributes=True) if made else set()

    def line(self, offset: int) -> int:
        """The line, counted from 1, of an offset."""
        return bisect_right(self.starts, offset)

    def at(self, offsets: Iterable[int]) -> Iterator[Part]:
        """The functions that hold these offsets."""
        for offset in offsets:
            line = self.line(offset)
            position = bisect_right(self.first_lines, line) - 1
            if position >= 0 and line <= self.parts[position].lines[1]:
                yield self.parts[position]

    def closure(self, offsets: set[int], attributes: bool = False) -> set[int]:
        """The functions that hold one of these offsets, or that mention by name something that does.

        With ``attributes``, a method brings the other methods of its class, which share its attributes.
        """
        reached: dict[int, Part] = {}
        seen: set[str] = set()
        while True:
            added = [part for part in self.at(offsets) if reached.setdefault(id(part.node), part) is part]
            if attributes:
                owners = {part.owner for part in added if part.owner is not None}
                added += [
                    part
                    for part in self.parts
                    if part.owner in owners and reached.setdefault(id(part.node), part) is part
                ]
            names = wanted_names(added)
            lines = sorted({self.line(offset) for offset in offsets})
            for first, last_line, node, owner in self.loose:
                if any_between(lines, first, last_line):
                    names |= bound_names(node, owner)
            names -= seen
            if not names:
                return set(reached)
            seen |= names
            offsets = {offset for name in names for offset in mentions(self.text, name)}


def any_between(lines: list[int], first: int, end: int) -> bool:
    """Whether one of these ordered lines is from ``first`` to ``end``."""
    position = bisect_right(lines, first - 1)
    return position < len(lines) and lines[position] <= end


def mentions(text: str, name: str) -> Iterator[int]:
    """Where a name stands as a whole word."""
    start = text.find(name)
    size = len(name)
    while start >= 0:
        end = start + size
        before = text[start - 1] if start else " "
        after = text[end] if end < len(text) else " "
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            yield start
        start = text.find(name, end)


def functions_of(body: Iterable[ast.stmt], owner: ast.ClassDef | None) -> Iterator[Part]:
    """The functions and methods of a module, those in ``if`` and ``try`` blocks too, not those inside functions."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Part(node.name, node, owner)
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, node)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            yield from functions_of(node.body, owner)
            yield from functions_of(getattr(node, "orelse", ()), owner)
            for handler in getattr(node, "handlers", ()):
                yield from functions_of(handler.body, owner)


class Loose(NamedTuple):
    """A statement of the module or of a class, outside functions: its own lines, and the class."""

    first: int
    end: int
    node: ast.stmt
    owner: ast.ClassDef | None


def loose_statements(body: Iterable[ast.stmt], owner: ast.ClassDef | None) -> Iterator[Loose]:
    """The statements outside functions; those that hold others count with their head only."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from loose_statements(node.body, node)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            yield Loose(node.lineno, node.body[0].lineno, node, owner)
            yield from loose_statements(node.body, owner)
            yield from loose_statements(getattr(node, "orelse", ()), owner)
            for handler in getattr(node, "handlers", ()):
                yield from loose_statements(handler.body, owner)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Loose(node.lineno, node.end_lineno or node.lineno, node, owner)


def bound_names(node: ast.stmt, owner: ast.ClassDef | None) -> set[str]:
    """The names that a statement outside functions may bind: through them, what it mentions is reached."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname for alias in node.names if alias.asname is not None}
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    found = {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return found if owner is None else found | {owner.name}


def wanted_names(parts: Iterable[Part]) -> set[str]:
    """The names by which these functions may be called.

    A class is called by its own name. What ``__init__`` stores may be called by any method, so that a class whose
    ``__init__`` matters is wanted as a whole, through the ``self`` of its methods.
    """
    names = set()
    for part in parts:
        if part.owner is None:
            names.add(part.name)
        elif part.name.startswith("__") or part.name in ("forward", "build", "backward"):
            names.add(part.owner.name)
        else:
            names.add(part.name)
    return names
