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

from sbp.inplace.lint import calls, classes
from sbp.inplace.lint.findings import Finding, unreadable
from sbp.inplace.lint.flow import Flow
from sbp.inplace.lint.knowledge import ENTRY_METHODS, FACTORIES, SOURCE_WORDS, last
from sbp.inplace.lint.reach import Reach, hands_out, may_write
from sbp.inplace.lint.scopes import ClassInfo, FunctionInfo
from sbp.inplace.lint.values import LIKELY, PLAIN

# Ways to get at torch.distributed.tensor.zeros() and its like: dotted, through the module, or by their names.
_NAMES = "|".join(sorted(FACTORIES))
_MODULE = r"torch\.distributed\._?tensor"
FACTORY_IMPORT = re.compile(
    rf"distributed\._?tensor\.(?:{_NAMES})\b"
    rf"|import\s+{_MODULE}\s+as\b"
    r"|from\s+torch\.distributed\s+import\s[^\n]*\b_?tensor\b"
    rf"|from\s+{_MODULE}(?:\._api)?\s+import\s+(?:\([^)]*\b(?:{_NAMES})\b|[^\n(]*\b(?:{_NAMES})\b|\*)"
)
ENTRIES = re.compile(r"def\s+(?:" + "|".join(sorted(ENTRY_METHODS)) + r")\b")


def lint_source(
    text: str, path: str = "<text>", sources: frozenset[str] = frozenset(), thorough: bool = False
) -> list[Finding]:
    """The findings in one file's text, in the order of the file, before ``noqa`` and configuration.

    ``sources`` are further functions whose result is a distributed tensor, by name or dotted name. ``thorough``
    follows functions that write nothing too, which tells more of what is safe to fix. A text that does not parse
    gives one finding that says so.
    """
    try:
        if not ("torch" in text or "oneflow" in text) or not may_write(text):
            return check_syntax(text, path)
        words = source_words(text, sources)
        if not words and not ENTRIES.search(text) and not hands_out(text):
            return check_syntax(text, path)
        return follow(ast.parse(text), text, path, words, sources, thorough)
    except SyntaxError as error:
        return [syntax_finding(error, path)]
    except ValueError as error:
        return [unreadable(path, f"cannot be parsed: {error}")]
    except (RecursionError, MemoryError):
        return [unreadable(path, "is nested too deeply to be read")]


def source_words(text: str, sources: frozenset[str]) -> list[str]:
    """The words in a text from which a distributed tensor may flow."""
    words = [word for word in SOURCE_WORDS if word in text]
    if words == ["placement"] and "sbp" not in text:
        words = []
    if "distributed" in text and "tensor" in text and FACTORY_IMPORT.search(text):
        words += [word for word in FACTORIES if word in text]
    return words + [last(name) for name in sources if last(name) in text]


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
    tree: ast.Module, text: str, path: str, words: list[str], sources: frozenset[str], thorough: bool
) -> list[Finding]:
    """The findings of a parsed file."""
    reach = Reach(tree, text, words)
    flow = Flow(reach, sources, thorough)
    try:
        flow.run(tree.body, flow.module)
        run_roots(flow, reach, None, bool(words))
        if flow.changed:
            # What one method stored, another may write to: look again with what is known now.
            changed, certain = flow.changed, flow.changed_certain
            flow.forget_results()
            run_roots(flow, reach, changed, bool(words) and certain)
        return flow.writes.findings(path, text.split("\n"))
    finally:
        flow.close()


def run_roots(flow: Flow, reach: Reach, only: set[ClassInfo] | None, functions_too: bool) -> None:
    """Follow the entry methods of modules, the functions that make modules which work in place, and the functions
    in which distributed tensors may be. ``only`` limits this to some classes and those that derive from them."""
    done: set[int] = set()
    roots_of_tensors = reach.wanted & reach.sourced
    while True:
        # Following a function may define classes and functions inside it.
        roots = [info for info in flow.classes if id(info) not in done]
        functions = [info for info in flow.functions if id(info) not in done]
        if not roots and not functions:
            return
        for info in roots:
            done.add(id(info))
            if only is None or not only.isdisjoint(info.ancestors()):
                run_class(flow, info, reach.wanted)
        for function in functions:
            done.add(id(function))
            nested = function.home is not flow.module
            if id(function.node) in reach.making or (
                functions_too and (nested or id(function.node) in roots_of_tensors)
            ):
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
