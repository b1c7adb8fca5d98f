"""One file: which of its functions have to be followed at all, and what following them finds.

Most lines of most files cannot matter, and reading them costs far less than following them. So the text is asked
first, with tests that let through everything that could give a finding:

* a file without any token that a write needs is only checked for its syntax;
* a function is followed when it holds such a token, or mentions by name a function that does.
"""

from __future__ import annotations

import ast
import re
import symtable
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sbp.inplace.lint import calls, classes
from sbp.inplace.lint.findings import Finding, unreadable
from sbp.inplace.lint.flow import Flow
from sbp.inplace.lint.knowledge import ENTRY_METHODS, INPLACE_NAMES, SOURCE_WORDS, last
from sbp.inplace.lint.scopes import ClassInfo, FunctionInfo
from sbp.inplace.lint.values import LIKELY, PLAIN

# ``inplace=True``, also by position: ReLU(True), F.relu(x, True).
INPLACE_TEXT = (
    r"\binplace\b|\b(?:"
    + "|".join(sorted({last(name) for name in INPLACE_NAMES}))
    + r")\s*\([^#]{0,200}?\bTrue\b"
)
# Every way to write to a tensor has one of these in its text. Comments and strings may match too; that costs time,
# never a finding.
WRITE = re.compile(
    r"(?:[-+*/%&|^]|<<|>>|\*\*|//)=(?!=)"  # augmented assignment; `@=` rebinds
    r"|[a-zA-Z0-9]_\b"  # add_, _foreach_add_, __iadd__ is below
    r"|\]\s*=(?!=)|\]\s*:[^\n]*="  # item assignment, annotated or not
    r"|\]\s*,|\]\s*\)\s*="  # ... as one of several targets
    r"|\bout\s*=(?!=)|" + INPLACE_TEXT + r"|\.data\b|\b_local_tensor\b|\bto_local\b|[\"']data[\"']"
    r"|__i[a-z]+__|__setitem__|\bi(?:add|sub|mul|truediv|floordiv|mod|pow|lshift|rshift|and|or|xor)\b|\bsetitem\b"
)
SOURCES = re.compile(r"\b(?:" + "|".join(sorted(SOURCE_WORDS)) + r")\b")
ENTRIES = re.compile(r"\bdef\s+(?:" + "|".join(sorted(ENTRY_METHODS)) + r")\b")
INPLACE = re.compile(INPLACE_TEXT)
TORCH = re.compile(r"\b(?:torch|oneflow)\b")


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


def lint_source(text: str, path: str = "<text>", sources: frozenset[str] = frozenset()) -> list[Finding]:
    """The findings in one file's text, in the order of the file, before ``noqa`` and configuration.

    ``sources`` are further functions whose result is a distributed tensor, by name or dotted name. A text that
    does not parse gives one finding that says so.
    """
    has_sources = SOURCES.search(text) is not None or any(last(name) in text for name in sources)
    has_roots = has_sources or ENTRIES.search(text) is not None or INPLACE.search(text) is not None
    try:
        if not has_roots or not TORCH.search(text) or not WRITE.search(text):
            return check_syntax(text, path)
        tree = ast.parse(text)
        return follow(tree, text, path, has_sources, sources)
    except SyntaxError as error:
        return [syntax_finding(error, path)]
    except ValueError as error:
        return [unreadable(path, f"cannot be parsed: {error}")]
    except (RecursionError, MemoryError):
        return [unreadable(path, "is nested too deeply to be read")]


def check_syntax(text: str, path: str) -> list[Finding]:
    """Nothing to find in this text, except that it may not be Python."""
    try:
        symtable.symtable(text, path, "exec")
    except SyntaxError:
        # symtable also refuses what parses but does not compile (two `nonlocal`s): that is not our concern.
        ast.parse(text)
    return []


def syntax_finding(error: SyntaxError, path: str) -> Finding:
    """The finding for a file that is not Python."""
    return unreadable(path, f"does not parse: {error.msg}", error.lineno or 1, (error.offset or 1) - 1)


def follow(
    tree: ast.Module, text: str, path: str, has_sources: bool, sources: frozenset[str]
) -> list[Finding]:
    """The findings of a parsed file."""
    flow = Flow(sources)
    reached = reaching_parts(tree, text)
    wanted = {id(part.node) for part in reached}
    starts = line_starts(text)
    making = {id(part.node) for part in reached if search(INPLACE, text, starts, *part.lines)}
    flow.run(tree.body, flow.module)
    run_roots(flow, wanted, making, has_sources)
    if flow.attributes_changed:
        # What one method stored, another may write to: look again with what is known now.
        flow.forget_results()
        run_roots(flow, wanted, making, has_sources)
    return flow.writes.findings(path, text.split("\n"))


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


def reaching_parts(tree: ast.Module, text: str) -> list[Part]:
    """The functions that write, or that mention by name something through which one that writes can be called."""
    parts = list(functions_of(tree.body, None))
    starts = line_starts(text)
    writing: list[int] = []
    line = 0
    for match in WRITE.finditer(text):
        line = advance(starts, line, match.start())
        writing.append(line)
    reached = {id(part.node): part for part in parts if overlaps(writing, part)}
    names = wanted_names(reached.values())
    seen: set[str] = set()
    loose = [(node, bound_names(node)) for node in loose_statements(tree.body)]
    while names:
        seen |= names
        pattern = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(names))) + r")\b")
        added = [
            part
            for part in parts
            if id(part.node) not in reached and search(pattern, text, starts, *part.lines)
        ]
        reached.update((id(part.node), part) for part in added)
        names = wanted_names(added)
        for node, bound in loose:
            if not bound <= seen and search(
                pattern, text, starts, node.lineno, node.end_lineno or node.lineno
            ):
                names |= bound
        # What __init__ or a class body stores may be called by any method.
        owners = {part.owner for part in added if part.owner is not None and part.name == "__init__"}
        names |= {"self"} if owners else set()
        names -= seen
    return [part for part in parts if id(part.node) in reached]


def loose_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of the module, and of its classes, that may hand on a function under another name."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from loose_statements(node.body)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield node


def bound_names(node: ast.stmt) -> set[str]:
    """The names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
    return {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}


def search(pattern: re.Pattern[str], text: str, starts: list[int], first: int, end: int) -> bool:
    """Whether a pattern is in these lines (counted from 1)."""
    stop = starts[end] if end < len(starts) else len(text)
    return pattern.search(text, starts[first - 1], stop) is not None


def wanted_names(parts: Iterable[Part]) -> set[str]:
    """The names by which these functions may be called."""
    names = set()
    for part in parts:
        if part.owner is not None and part.name in ("forward", "build", "__call__", "__init__", "backward"):
            names.add(part.owner.name)
        else:
            names.add(part.name)
    return names


def line_starts(text: str) -> list[int]:
    """The offset at which each line starts."""
    starts = [0]
    find = text.find
    position = find("\n")
    while position >= 0:
        starts.append(position + 1)
        position = find("\n", position + 1)
    return starts


def advance(starts: list[int], line: int, offset: int) -> int:
    """The number of the line (from 0) that an offset is in, counting on from an earlier one."""
    last = len(starts) - 1
    while line < last and starts[line + 1] <= offset:
        line += 1
    return line


def overlaps(ordered: list[int], part: Part) -> bool:
    """Whether one of the lines (from 0, in order) is inside a function."""
    first, end = part.lines
    position = bisect_left(ordered, first - 1)
    return position < len(ordered) and ordered[position] < end


def run_roots(flow: Flow, wanted: set[int], making: set[int], has_sources: bool) -> None:
    """Follow the entry methods of modules, the functions that make modules which work in place, and where
    distributed tensors are made every function."""
    done: set[int] = set()
    while True:
        # Following a function may define classes and functions inside it.
        roots = [info for info in flow.classes if id(info) not in done]
        functions = [info for info in flow.functions if id(info) not in done]
        if not roots and not functions:
            return
        for info in roots:
            done.add(id(info))
            run_class(flow, info, wanted)
        for function in functions:
            done.add(id(function))
            nested = function.home is not flow.module
            if id(function.node) in making or (has_sources and (nested or id(function.node) in wanted)):
                run_function(flow, function)


def run_class(flow: Flow, info: ClassInfo, wanted: set[int]) -> None:
    """Follow the entry methods of a module class."""
    if not classes.is_module(info):
        return
    receiver = classes.instance_value(info)
    init = info.methods.get("__init__")
    if init is not None and id(init.node) in wanted:
        classes.prepare(flow, info)
    for name in sorted(ENTRY_METHODS):
        method = info.methods.get(name)
        if method is not None and (id(method.node) in wanted or info.home is not flow.module):
            calls.enter(flow, method, receiver, LIKELY, assumed=True)


def run_function(flow: Flow, info: FunctionInfo) -> None:
    """Follow a function on its own, knowing nothing of its arguments but what is annotated."""
    receiver = (
        classes.instance_value(info.owner) if info.owner is not None and info.kind == "function" else None
    )
    if info.results:
        return
    calls.enter(flow, info, receiver, PLAIN, assumed=False)
