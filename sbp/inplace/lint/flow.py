"""Follows values through the statements of one file, and tells ``writes`` of every in-place write it meets.

It is an abstract interpreter: each name is bound to a ``Value``, branches are joined, loop bodies are run twice,
and functions of the file are entered at their calls. Nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from sbp.inplace.lint import calls, classes, narrow
from sbp.inplace.lint.annotations import annotation_value
from sbp.inplace.lint.keeping import kept_augmented
from sbp.inplace.lint.knowledge import BUILTINS, LOCAL_ATTRIBUTES, api, canonical, last
from sbp.inplace.lint.reach import Reach
from sbp.inplace.lint.scopes import (
    ClassInfo,
    ClassRef,
    Frame,
    FunctionInfo,
    FunctionNode,
    FunctionRef,
    Instance,
    MethodRef,
    NameRef,
    SuperRef,
)
from sbp.inplace.lint.syntax import decorator_name, is_tensor_index, path_of, source
from sbp.inplace.lint.values import (
    ASSUMED,
    BORROWED,
    CERTAIN,
    DATA,
    FALSE_VALUE,
    FRESH,
    HINTED,
    KNOWN,
    LIKELY,
    LOCAL,
    MAPPING,
    NO_CONSTANT,
    NONE,
    NONE_VALUE,
    NUMBER,
    NUMBER_VALUE,
    OBJECT_VALUE,
    PARAMETER,
    SEQUENCE,
    SHAPE_VALUE,
    SPLIT_VIEW,
    TENSOR,
    TEXT,
    TEXT_VALUE,
    TRUE_VALUE,
    UNKNOWN,
    UNKNOWN_VALUE,
    Reason,
    Value,
    join,
    mapping_of,
    same,
    sequence,
    sequence_of,
)
from sbp.inplace.lint.writes import (
    AUGMENTED,
    DATA_WRITE,
    ITEM,
    LOCAL_WRITE,
    Writes,
    augmented_hits,
    item_hits,
)

# Enough for the longest model files; a file that needs more is cut short rather than followed for minutes.
# What is imported from these is no tensor that somebody made.
KNOWN_LIBRARIES = (
    "torch",
    "builtins.",
    "numpy",
    "math",
    "functools",
    "typing",
    "os",
    "sys",
    "copy",
    "operator",
)

# Before a name in ``Flow.dropped``: its value may have been kept somewhere.
FOR_GOOD = "!"

MAX_STEPS = 400_000
MAX_DEPTH = 24
MAX_CONTEXTS = 5

SYMBOLS: dict[type[ast.operator], str] = {
    ast.Add: "+=", ast.Sub: "-=", ast.Mult: "*=", ast.Div: "/=", ast.FloorDiv: "//=", ast.Mod: "%=",
    ast.Pow: "**=", ast.LShift: "<<=", ast.RShift: ">>=", ast.BitAnd: "&=", ast.BitOr: "|=", ast.BitXor: "^=",
}  # fmt: skip


class Flow:
    """The analysis of one file."""

    def __init__(self, reach: Reach, sources: frozenset[str] = frozenset(), thorough: bool = False) -> None:
        self.reach = reach
        self.sources = sources
        self.thorough = thorough
        self.writes = Writes()
        self.module = Frame({"__name__": TEXT_VALUE}, context=1)
        self.star_imports: list[str] = []
        self.classes: list[ClassInfo] = []
        self.functions: list[FunctionInfo] = []
        self.created: list[FunctionInfo | ClassInfo] = []
        self.declared: dict[tuple[int, int], Value | None] = {}
        self.parsed: list[ast.expr] = []
        self.constants: dict[int | str, Value] = {}
        self.steps = 0
        self.depth = 0
        self.preparing = 0
        self.changed: set[ClassInfo] = set()
        self.changed_certain = False
        self.place = "the module"
        self.statement: ast.stmt | None = None
        self.dropped: list[str] = []
        self.api = api()

    # ---------------------------------------------------------------- statements

    def run(self, body: Sequence[ast.stmt], frame: Frame) -> bool:
        """Follow statements; returns whether control cannot reach their end."""
        for statement in body:
            self.steps += 1
            if self.steps > MAX_STEPS:
                return True
            self.statement = statement
            handler = STATEMENTS.get(type(statement))
            if handler is not None and handler(self, statement, frame):
                return True
        return False

    def run_expression(self, node: ast.Expr, frame: Frame) -> None:
        if type(node.value) is ast.Constant:
            return
        outer_dropped, self.dropped = self.dropped, []
        value = self.value(node.value, frame)
        dropped, self.dropped = self.dropped, outer_dropped
        if value.marks & BORROWED and not any(name.startswith(FOR_GOOD) for name in dropped):
            # The view is gone at the end of the statement.
            for name in dropped:
                frame.names[name] = frame.names[name].with_marks(add=FRESH)
        else:
            outer_dropped.extend(dropped)

    def run_assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self.assigned_value(node.targets, node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame, node)

    def assigned_value(self, targets: Sequence[ast.expr], node: ast.expr, frame: Frame) -> Value:
        """The value of a right-hand side; whether it is fresh depends on whether it overwrites what it views."""
        outer_dropped, self.dropped = self.dropped, []
        value = self.value(node, frame)
        dropped, self.dropped = self.dropped, outer_dropped
        outer_dropped.extend(dropped)
        named_too = type(node) in RELEASED and self.release(node, frame)
        if not value.marks & (FRESH | BORROWED):
            return value
        if named_too or len(targets) > 1:
            return value.with_marks(drop=FRESH | BORROWED)
        if value.marks & BORROWED:
            target = targets[0]
            overwrites = isinstance(target, ast.Name) and set(dropped) == {target.id}
            value = value.with_marks(add=FRESH if overwrites else 0, drop=BORROWED)
        return value

    def run_annotated(self, node: ast.AnnAssign, frame: Frame) -> None:
        declared = annotation_value(self, node.annotation, frame)
        value = self.assigned_value([node.target], node.value, frame) if node.value is not None else None
        if value is None:
            if declared is not None:
                if isinstance(node.target, ast.Name):
                    frame.names[node.target.id] = declared
                    if frame.owner is not None and frame.is_class:
                        frame.owner.fields.append(node.target.id)
                elif isinstance(node.target, ast.Attribute):
                    self.assign(node.target, declared, frame, node)
            return
        if declared is not None and not value.kinds & ~(UNKNOWN | NONE) and value.level < CERTAIN:
            value = declared
        if frame.owner is not None and frame.is_class and isinstance(node.target, ast.Name):
            frame.owner.fields.append(node.target.id)
        self.assign(node.target, value, frame, node)

    def assign(self, target: ast.expr, value: Value, frame: Frame, node: ast.AST) -> None:
        """Bind a value to a target, and report the writes that this is."""
        kind = type(target)
        if kind is ast.Name:
            frame.names[target.id] = value  # type: ignore[attr-defined]
        elif kind is ast.Attribute:
            self.assign_attribute(target, value, frame, node)  # type: ignore[arg-type]
        elif kind is ast.Subscript:
            self.assign_item(target, value, frame, node)  # type: ignore[arg-type]
        elif kind is ast.Tuple or kind is ast.List:
            for item, part in zip(target.elts, unpacked(value, target.elts)):  # type: ignore[attr-defined]
                self.assign(item, part, frame, node)
        elif kind is ast.Starred:
            self.assign(target.value, sequence_of(value.elements()), frame, node)  # type: ignore[attr-defined]

    def assign_attribute(self, target: ast.Attribute, value: Value, frame: Frame, node: ast.AST) -> None:
        base = self.value(target.value, frame)
        name = target.attr
        if name == "data" and base.kinds & TENSOR and (base.level == CERTAIN or base.sure >= HINTED):
            self.writes.add(
                node,
                DATA_WRITE,
                base,
                frame.context,
                f"`{source(target)} = ...` puts other memory under the tensor and passes its placement by",
                "`.data =` changes the tensor for everybody who holds it",
                self.place,
            )
            return
        if name in LOCAL_ATTRIBUTES and base.level == CERTAIN and base.kinds & TENSOR:
            self.writes.add(
                node,
                LOCAL_WRITE,
                base,
                frame.context,
                f"`{source(target)} = ...` replaces the local piece behind the distributed tensor's back",
                "the local piece belongs to the distributed tensor",
                self.place,
            )
            return
        value = value.with_marks(drop=FRESH | BORROWED)
        key = path_of(target)
        if key is not None:
            frame.bind_path(key, value)
        for ref in base.refs:
            if isinstance(ref, Instance) and ref.info is not None:
                self.store_attribute(ref.info, name, value)

    def store_attribute(self, info: ClassInfo, name: str, value: Value) -> None:
        """Add what was assigned to ``self.name`` to what is known of the attribute."""
        known = info.attributes.get(name)
        merged = value if known is None else join(known, value)
        if known is None or not same(known, merged):
            info.attributes[name] = merged
            if not self.preparing and tells_more(known, merged):
                self.changed.add(info)
                self.changed_certain |= merged.level == CERTAIN

    def close(self) -> None:
        """Let go of everything. Frames and functions refer to each other; without this, only the garbage
        collector could free the syntax tree, and it would cost more than the analysis."""
        for info in self.created:
            info.__dict__.clear()
        self.module.names.clear()
        self.created.clear()
        self.writes.records.clear()

    def may_skip(self, info: FunctionInfo) -> bool:
        """Whether a function neither writes nor makes a distributed tensor, so that only its result matters."""
        if self.thorough or info.name == "__init__" or info.home is not self.module:
            return False
        node = id(info.node)
        return node not in self.reach.wanted and node not in self.reach.sourced

    def forget_results(self) -> None:
        """Start the functions afresh; what is known of attributes stays."""
        self.changed = set()
        self.changed_certain = False
        self.functions = [info for info in self.functions if info.home is self.module]
        self.classes = [info for info in self.classes if info.home is self.module or info.home.is_class]
        for function in self.functions:
            function.results.clear()
            function.escaped = False

    def assign_item(self, target: ast.Subscript, value: Value, frame: Frame, node: ast.AST) -> None:
        base = self.value(target.value, frame)
        index = self.value(target.slice, frame)
        if item_hits(base, target.slice, index, frame.context):
            self.report_item(target, base, frame, node)
            return
        if isinstance(target.value, ast.Name):
            stored = value.with_marks(drop=FRESH | BORROWED)
            if base.kinds & (SEQUENCE | MAPPING):
                frame.names[target.value.id] = base.with_entry(index.const, stored)
            elif index.kinds == TEXT and base.kinds == UNKNOWN:
                # Only a mapping takes a string.
                frame.names[target.value.id] = Value(MAPPING | UNKNOWN).with_entry(index.const, stored)
        self.release(getattr(node, "value", None), frame)

    def report_item(self, target: ast.Subscript, base: Value, frame: Frame, node: ast.AST) -> None:
        """Report ``x[i] = ...`` or ``x[i] += ...`` on a tensor."""
        if base.level == CERTAIN and calls.cuts_split_dimension(self, base, target.slice, frame):
            base = base.with_marks(add=SPLIT_VIEW)
        self.writes.add(
            node,
            ITEM,
            base,
            frame.context,
            f"assignment to `{source(target)}` writes into `{source(target.value)}` in place",
            "an assignment to items has no out-of-place form with the same meaning",
            self.place,
        )

    def run_augmented(self, node: ast.AugAssign, frame: Frame) -> None:
        right = self.value(node.value, frame)
        target = node.target
        if type(node.op) is ast.MatMult:
            self.assign(
                target, calls.tensor_result(self, frame, (self.value(target, frame), right)), frame, node
            )
            return
        if isinstance(target, ast.Subscript):
            base = self.value(target.value, frame)
            index = self.value(target.slice, frame)
            if item_hits(base, target.slice, index, frame.context):
                self.report_item(target, base, frame, node)
                return
            value = self.item(base, target.slice, index, frame)
        else:
            value = self.value(target, frame)
        if augmented_hits(value, right, frame.context):
            self.report_augmented(node, value, frame)
        self.assign_augmented(target, augmented_result(self, frame, value, right), frame)

    def assign_augmented(self, target: ast.expr, result: Value, frame: Frame) -> None:
        """Bind the result of an augmented assignment without counting it as one more write."""
        if isinstance(target, ast.Name):
            frame.names[target.id] = result
        elif isinstance(target, ast.Attribute):
            key = path_of(target)
            if key is not None:
                frame.bind_path(key, result.with_marks(drop=FRESH | BORROWED))
            base = self.value(target.value, frame)
            for ref in base.refs:
                if isinstance(ref, Instance) and ref.info is not None:
                    self.store_attribute(ref.info, target.attr, result.with_marks(drop=FRESH | BORROWED))

    def report_augmented(self, node: ast.AugAssign, value: Value, frame: Frame) -> None:
        target = node.target
        kept = kept_augmented(frame, node)
        if isinstance(target, ast.Attribute) and target.attr == "data":
            value = value.with_marks(add=DATA)
        self.writes.add(
            node,
            AUGMENTED,
            value,
            frame.context,
            f"`{source(target)} {SYMBOLS[type(node.op)]} ...` writes into `{source(target)}` in place",
            kept,
            self.place,
        )

    def run_if(self, node: ast.If, frame: Frame) -> bool:
        self.value(node.test, frame)
        before = frame.names
        frame.names = dict(before)
        narrow.narrow(self, node.test, frame, True)
        ended = self.run(node.body, frame)
        after_body = frame.names
        frame.names = dict(before)
        narrow.narrow(self, node.test, frame, False)
        ended_else = self.run(node.orelse, frame)
        if ended and ended_else:
            return True
        if ended_else:
            frame.names = after_body
        elif not ended:
            frame.names = joined_names(after_body, frame.names)
        return False

    def run_loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: Frame) -> None:
        """A loop body may run again on what it left: run it twice when the first time changed something."""
        repeats = 2 if frame.loops < 2 else 1
        before = frame.names
        broken: list[dict[str, Value]] = []
        frame.loops += 1
        for _ in range(repeats):
            frame.names = dict(before)
            if isinstance(node, ast.While):
                self.value(node.test, frame)
                narrow.narrow(self, node.test, frame, True)
            else:
                iterated = self.value(node.iter, frame)
                self.release(node.iter, frame)
                self.assign(node.target, self.iteration(iterated), frame, node)
            outer_exits, frame.exits = frame.exits, []
            ended = self.run(node.body, frame)
            after = before if ended else joined_names(before, frame.names)
            for names, left in frame.exits:
                if left:
                    broken.append(names)
                else:
                    after = joined_names(after, names)
            frame.exits = outer_exits
            changed = any(
                name not in before or not same(before[name], value) for name, value in after.items()
            )
            before = after
            if not changed:
                break
        frame.loops -= 1
        frame.names = before
        self.run(node.orelse, frame)
        for names in broken:
            # `break` passes `else` by.
            frame.names = joined_names(frame.names, names)

    def run_with(self, node: ast.With | ast.AsyncWith, frame: Frame) -> bool:
        for item in node.items:
            value = self.value(item.context_expr, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value.with_marks(drop=FRESH | BORROWED), frame, node)
        return self.run(node.body, frame)

    def run_try(self, node: ast.Try, frame: Frame) -> bool:
        before = dict(frame.names)
        ended = self.run(node.body, frame)
        if not ended:
            ended = self.run(node.orelse, frame)
        after = frame.names
        reached = [] if ended else [after]
        start = joined_names(before, after)
        for handler in node.handlers:
            frame.names = dict(start)
            if handler.name:
                frame.names[handler.name] = OBJECT_VALUE
            if not self.run(handler.body, frame):
                reached.append(frame.names)
        names = reached[0] if reached else start
        for other in reached[1:]:
            names = joined_names(names, other)
        frame.names = names
        ended = not reached
        return self.run(node.finalbody, frame) or ended

    def run_match(self, node: ast.Match, frame: Frame) -> None:
        subject = self.value(node.subject, frame)
        before = frame.names
        merged = before
        for case in node.cases:
            frame.names = dict(before)
            for pattern in ast.walk(case.pattern):
                if isinstance(pattern, (ast.MatchAs, ast.MatchStar)) and pattern.name:
                    whole = pattern is case.pattern
                    frame.names[pattern.name] = subject if whole else UNKNOWN_VALUE
            if case.guard is not None:
                self.value(case.guard, frame)
            if not self.run(case.body, frame):
                merged = joined_names(merged, frame.names)
        frame.names = merged

    def run_return(self, node: ast.Return, frame: Frame) -> bool:
        value = NONE_VALUE
        if node.value is not None:
            outer_dropped, self.dropped = self.dropped, []
            value = self.value(node.value, frame)
            if value.marks & BORROWED:
                kept = any(name.startswith(FOR_GOOD) for name in self.dropped)
                value = value.with_marks(add=0 if kept else FRESH, drop=BORROWED)
            self.dropped = outer_dropped
        frame.returned = value if frame.returned is None else join(frame.returned, value)
        return True

    def run_end(self, node: ast.stmt, frame: Frame) -> bool:
        return True

    def run_exit(self, node: ast.Break | ast.Continue, frame: Frame) -> bool:
        frame.exits.append((frame.names, type(node) is ast.Break))
        return True

    def run_assert(self, node: ast.Assert, frame: Frame) -> None:
        self.value(node.test, frame)
        narrow.narrow(self, node.test, frame, True)

    def run_delete(self, node: ast.Delete, frame: Frame) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                frame.names.pop(target.id, None)

    def run_import(self, node: ast.Import, frame: Frame) -> None:
        for alias in node.names:
            if alias.asname:
                frame.names[alias.asname] = named(alias.name)
            else:
                top = alias.name.partition(".")[0]
                frame.names[top] = named(top)

    def run_import_from(self, node: ast.ImportFrom, frame: Frame) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name == "*":
                self.star_imports.append(canonical(module))
            else:
                separator = "" if module.endswith(".") else "."
                frame.names[alias.asname or alias.name] = named(f"{module}{separator}{alias.name}")

    def run_outer(self, node: ast.Global | ast.Nonlocal, frame: Frame) -> None:
        frame.outer_names = frame.outer_names.union(node.names)

    def run_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> None:
        info = self.define(node, node.name, frame)
        local = False
        for decorator in node.decorator_list:
            dotted = decorator_name(decorator)
            if dotted in (
                "staticmethod",
                "classmethod",
                "property",
                "functools.cached_property",
                "cached_property",
            ):
                info.kind = {"staticmethod": "static", "classmethod": "class"}.get(dotted, "property")
            elif last(dotted) == "local_map":
                local = True
            elif dotted.endswith((".setter", ".deleter", "overload")):
                return
        if frame.owner is not None and frame.is_class:
            info.owner = frame.owner
            frame.owner.methods[node.name] = info
        frame.names[node.name] = Value(OBJECT_VALUE.kinds, refs=(FunctionRef(info, None, local),))

    def define(self, node: FunctionNode, name: str, frame: Frame) -> FunctionInfo:
        """Make a function of this file known; its defaults are evaluated here."""
        home = frame
        while home.is_class and home.parent is not None:
            home = home.parent
        info = FunctionInfo(node, name, home)
        arguments = node.args
        positional = arguments.posonlyargs + arguments.args
        for argument, default in zip(
            positional[len(positional) - len(arguments.defaults) :], arguments.defaults
        ):
            info.defaults[argument.arg] = self.value(default, frame).with_marks(drop=FRESH)
        for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults):
            if keyword_default is not None:
                info.defaults[argument.arg] = self.value(keyword_default, frame).with_marks(drop=FRESH)
        if frame is not self.module and not frame.is_class:
            self.release_captured(node, frame)
        self.functions.append(info)
        self.created.append(info)
        return info

    def run_class(self, node: ast.ClassDef, frame: Frame) -> None:
        bases = tuple(self.value(base, frame) for base in node.bases)
        info = ClassInfo(node, node.name, frame, bases)
        body = Frame({}, frame.context, parent=frame, owner=info, is_class=True)
        self.run(node.body, body)
        for name, value in body.names.items():
            if name not in info.methods:
                info.attributes[name] = value
        frame.names[node.name] = Value(OBJECT_VALUE.kinds, refs=(ClassRef(info),))
        self.classes.append(info)
        self.created.append(info)

    # ---------------------------------------------------------------- freshness

    def release(self, node: ast.AST | None, frame: Frame, for_good: bool = True) -> bool:
        """A name's value gets a second reference: it is no longer the only one. Returns whether there was a name.

        ``for_good`` when something may keep the reference; otherwise it lives as long as the result of the
        operation does (a view), so that overwriting the name makes the result the only one.
        """
        kind = type(node)
        if kind is ast.Name:
            name = node.id  # type: ignore[union-attr]
            value = frame.names.get(name)
            if value is not None and value.marks & (FRESH | BORROWED):
                frame.names[name] = value.with_marks(drop=FRESH | BORROWED)
                self.dropped.append(FOR_GOOD + name if for_good else name)
            return True
        if kind is ast.IfExp:
            one = self.release(node.body, frame, for_good)  # type: ignore[union-attr]
            return self.release(node.orelse, frame, for_good) or one  # type: ignore[union-attr]
        if kind is ast.BoolOp or kind is ast.Tuple or kind is ast.List:
            parts = node.values if kind is ast.BoolOp else node.elts  # type: ignore[union-attr]
            released = [self.release(part, frame, for_good) for part in parts]
            return any(released)
        if kind is ast.NamedExpr or kind is ast.Starred:
            inner = self.release(node.value, frame, for_good)  # type: ignore[union-attr]
            return True if kind is ast.NamedExpr else inner
        return kind is ast.Attribute

    def release_captured(self, node: ast.AST, frame: Frame) -> None:
        """A nested function may keep every name that it mentions."""
        for inner in ast.walk(node):
            if type(inner) is ast.Name:
                self.release(inner, frame)

    # ---------------------------------------------------------------- expressions

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """The value of an expression; the writes inside it are reported on the way."""
        kind = type(node)
        if kind is ast.Name:
            found = frame.names.get(node.id)  # type: ignore[attr-defined]
            return found if found is not None else self.outer(node.id, frame)  # type: ignore[attr-defined]
        return EXPRESSIONS[kind](self, node, frame)

    def outer(self, name: str, frame: Frame) -> Value:
        """A name that the frame does not bind: from an enclosing function, the module, or Python."""
        above = frame.parent
        while above is not None:
            found = above.names.get(name)
            if found is not None and not above.is_class:
                return found.with_marks(drop=FRESH | BORROWED)
            above = above.parent
        found = self.module.names.get(name)
        if found is not None:
            return found.with_marks(drop=FRESH | BORROWED)
        if name in BUILTINS:
            return named(f"builtins.{name}")
        if len(self.star_imports) == 1:
            return named(f"{self.star_imports[0]}.{name}")
        return UNKNOWN_VALUE

    def constant(self, node: ast.Constant, frame: Frame) -> Value:
        value = node.value
        if value is None:
            return NONE_VALUE
        kind = type(value)
        if kind is bool:
            return TRUE_VALUE if value else FALSE_VALUE
        if kind is int or kind is str:
            known = self.constants.get(value)  # type: ignore[arg-type]
            if known is None:
                known = self.constants[value] = Value(  # type: ignore[index]
                    NUMBER if kind is int else TEXT, const=value
                )
            return known
        if kind is bytes:
            return TEXT_VALUE
        return NUMBER_VALUE if kind in (float, complex) else OBJECT_VALUE

    def attribute(self, node: ast.Attribute, frame: Frame) -> Value:
        if frame.paths and type(node.value) is ast.Name:
            known = frame.names.get(f"{node.value.id}.{node.attr}")
            if known is not None:
                return known
        base = self.value(node.value, frame)
        result = self.attribute_of(base, node.attr, frame, node.lineno)
        if result.marks & FRESH and self.release(node.value, frame, for_good=False):
            result = result.with_marks(add=BORROWED, drop=FRESH)
        return result

    def attribute_of(self, base: Value, name: str, frame: Frame, line: int) -> Value:
        """``base.name``."""
        for ref in base.refs:
            if isinstance(ref, NameRef):
                return named(f"{ref.dotted}.{name}")
            found = classes.attribute_of_ref(self, ref, base, name, frame)
            if found is not None:
                return found
        if name in LOCAL_ATTRIBUTES and base.kinds & (TENSOR | UNKNOWN) and not is_self(base):
            why = base.why if base.level == CERTAIN else Reason(f".{name}", line)
            return Value(TENSOR, CERTAIN, KNOWN, why, LOCAL, split=base.split)
        if base.kinds & (TENSOR | UNKNOWN):
            found = tensor_attribute(self, base, name)
            if found is not None:
                return found
        if base.kinds & SEQUENCE and name in ("values", "indices"):
            return base.elements()
        return Value(UNKNOWN, refs=(MethodRef(base, name),))

    def subscript(self, node: ast.Subscript, frame: Frame) -> Value:
        base = self.value(node.value, frame)
        index = self.value(node.slice, frame)
        result = self.item(base, node.slice, index, frame)
        if result.kinds & TENSOR and not is_basic_index(node.slice, index):
            # Indexing with a tensor or a list copies.
            if result.marks & LOCAL:
                result = Value(TENSOR, frame.context, result.sure)
            if index.kinds == TENSOR and index.sure >= KNOWN:
                return result.with_marks(add=FRESH, drop=BORROWED | DATA | SPLIT_VIEW)
        if result.marks & FRESH and self.release(node.value, frame, for_good=False):
            result = result.with_marks(add=BORROWED, drop=FRESH)
        return result

    def item(self, base: Value, index: ast.expr, index_value: Value, frame: Frame) -> Value:
        """``base[index]``."""
        kinds = base.kinds
        if kinds & TENSOR:
            if base.level == CERTAIN and calls.cuts_split_dimension(self, base, index, frame):
                return base.replaced(marks=base.marks | SPLIT_VIEW, split=None, items=None, element=None)
            sure = base.sure
            if sure < KNOWN:
                sure = ASSUMED if is_tensor_index(index) else HINTED
            return Value(
                base.kinds & ~NONE,
                base.level,
                sure,
                base.why,
                base.marks & ~PARAMETER,
                split=base.split if isinstance(index, ast.Slice) else None,
            )
        if kinds & SEQUENCE and isinstance(index, ast.Slice):
            return sequence_of(base.elements()) if base.items != () else base
        position = index_value.const
        if (
            base.items is not None
            and type(position) is int
            and -len(base.items) <= position < len(base.items)
        ):
            return base.items[position]
        if kinds & (SEQUENCE | MAPPING):
            entry = base.entry(position)
            return base.elements() if entry is None else entry
        if base.refs:
            found = classes.item_of_object(base, position)
            if found is not None:
                return found
        if kinds & UNKNOWN and is_tensor_index(index) and frame.context >= LIKELY:
            return Value(TENSOR | UNKNOWN, frame.context, HINTED)
        return UNKNOWN_VALUE

    def iteration(self, value: Value) -> Value:
        """What a loop over a value is given."""
        if value.kinds & (SEQUENCE | MAPPING):
            if value.kinds & MAPPING:
                return UNKNOWN_VALUE
            return value.elements()
        if value.kinds & TENSOR:
            sure = value.sure if value.sure >= KNOWN else HINTED
            return value.replaced(
                sure=sure,
                marks=value.marks & ~(FRESH | BORROWED | PARAMETER),
                split=None,
                const=UNKNOWN_VALUE.const,
            )
        return (classes.item_of_object(value, None) if value.refs else None) or UNKNOWN_VALUE

    def binary(self, node: ast.BinOp, frame: Frame) -> Value:
        left = self.value(node.left, frame)
        right = self.value(node.right, frame)
        both = left.kinds | right.kinds
        if not both & ~NUMBER:
            return NUMBER_VALUE
        if left.kinds == TEXT:
            return TEXT_VALUE
        if SEQUENCE in (left.kinds, right.kinds) and type(node.op) in (ast.Add, ast.Mult):
            return added_sequences(left, right)
        if both & TENSOR:
            return calls.tensor_result(self, frame, (left, right))
        return UNKNOWN_VALUE if both & UNKNOWN else Value(both)

    def unary(self, node: ast.UnaryOp, frame: Frame) -> Value:
        value = self.value(node.operand, frame)
        if type(node.op) is ast.Not:
            return NUMBER_VALUE
        if value.kinds & TENSOR:
            return calls.tensor_result(self, frame, (value,))
        if type(value.const) is int and type(node.op) is ast.USub:
            return Value(NUMBER, const=-value.const)
        return NUMBER_VALUE if value.kinds == NUMBER else UNKNOWN_VALUE

    def comparison(self, node: ast.Compare, frame: Frame) -> Value:
        values = [self.value(node.left, frame), *(self.value(other, frame) for other in node.comparators)]
        if type(node.ops[0]) in (ast.Is, ast.IsNot, ast.In, ast.NotIn):
            return NUMBER_VALUE
        for value in values:
            if value.kinds & TENSOR:
                return calls.tensor_result(self, frame, values)
        return UNKNOWN_VALUE if any(value.kinds & UNKNOWN for value in values) else NUMBER_VALUE

    def rejoin(self, before: dict[str, Value], dropped: int, frame: Frame) -> None:
        """Go back to the names before a conditional part, but keep what it bound with ``:=`` and what it shared."""
        frame.names = before
        if len(self.dropped) > dropped:
            for name in (entry.lstrip(FOR_GOOD) for entry in self.dropped[dropped:]):
                if name in before:
                    before[name] = before[name].with_marks(drop=FRESH | BORROWED)
        if frame.walrus:
            before.update(frame.walrus)

    def boolean(self, node: ast.BoolOp, frame: Frame) -> Value:
        before, dropped = frame.names, len(self.dropped)
        frame.names = dict(before)
        result: Value | None = None
        for part in node.values:
            value = self.value(part, frame)
            result = value if result is None else join(result, value)
            narrow.narrow(self, part, frame, type(node.op) is ast.And)
        self.rejoin(before, dropped, frame)
        assert result is not None
        return result.with_marks(drop=FRESH) if any(type(v) is ast.Name for v in node.values) else result

    def conditional(self, node: ast.IfExp, frame: Frame) -> Value:
        self.value(node.test, frame)
        before, dropped = frame.names, len(self.dropped)
        frame.names = dict(before)
        narrow.narrow(self, node.test, frame, True)
        one = self.value(node.body, frame)
        frame.names = dict(before)
        narrow.narrow(self, node.test, frame, False)
        other = self.value(node.orelse, frame)
        self.rejoin(before, dropped, frame)
        return join(one, other)

    def display(self, node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
        items = []
        starred = False
        for element in node.elts:
            value = self.value(element, frame)
            self.release(element, frame)
            if type(element) is ast.Starred:
                starred = True
            items.append(value.with_marks(drop=FRESH | BORROWED))
        if starred:
            joined = Value(SEQUENCE, items=tuple(items)).elements()
            return sequence_of(joined)
        return Value(SEQUENCE, items=tuple(items))

    def dictionary(self, node: ast.Dict, frame: Frame) -> Value:
        made = mapping_of(None)
        for key, item in zip(node.keys, node.values):
            value = self.value(item, frame)
            if key is None:
                value, place = value.elements(), NO_CONSTANT
            else:
                place = self.value(key, frame).const
                self.release(item, frame)
            made = made.with_entry(place, value.with_marks(drop=FRESH | BORROWED))
        return made

    def starred(self, node: ast.Starred, frame: Frame) -> Value:
        return self.iteration(self.value(node.value, frame))

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: Frame
    ) -> Value:
        before, dropped = frame.names, len(self.dropped)
        frame.names = dict(before)
        for generator in node.generators:
            iterated = self.value(generator.iter, frame)
            self.release(generator.iter, frame)
            self.assign(generator.target, self.iteration(iterated), frame, node)
            for condition in generator.ifs:
                self.value(condition, frame)
                narrow.narrow(self, condition, frame, True)
        if isinstance(node, ast.DictComp):
            self.value(node.key, frame)
            result = mapping_of(self.value(node.value, frame).with_marks(drop=FRESH | BORROWED))
        else:
            result = sequence_of(self.value(node.elt, frame).with_marks(drop=FRESH | BORROWED))
        self.rejoin(before, dropped, frame)
        return result

    def walrus(self, node: ast.NamedExpr, frame: Frame) -> Value:
        value = self.value(node.value, frame)
        self.release(node.value, frame)
        value = value.with_marks(drop=FRESH | BORROWED)
        self.assign(node.target, value, frame, node)
        frame.walrus[node.target.id] = value
        return value

    def function(self, node: ast.Lambda, frame: Frame) -> Value:
        return function_value(self.define(node, "<lambda>", frame))

    def text(self, node: ast.JoinedStr, frame: Frame) -> Value:
        return TEXT_VALUE

    def awaited(self, node: ast.Await, frame: Frame) -> Value:
        self.value(node.value, frame)
        return UNKNOWN_VALUE

    def yielded(self, node: ast.Yield, frame: Frame) -> Value:
        if node.value is not None:
            value = self.value(node.value, frame).with_marks(drop=FRESH | BORROWED)
            self.release(node.value, frame)
            frame.yielded = value if frame.yielded is None else join(frame.yielded, value)
        return UNKNOWN_VALUE

    def yielded_from(self, node: ast.YieldFrom, frame: Frame) -> Value:
        value = self.iteration(self.value(node.value, frame))
        frame.yielded = value if frame.yielded is None else join(frame.yielded, value)
        return UNKNOWN_VALUE

    def slice(self, node: ast.Slice, frame: Frame) -> Value:
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                self.value(part, frame)
        return OBJECT_VALUE

    def other(self, node: ast.expr, frame: Frame) -> Value:
        """An expression of a kind that says nothing: only what is inside it matters."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, frame)
        return UNKNOWN_VALUE


@lru_cache(maxsize=4096)
def named(dotted: str) -> Value:
    """The value of an imported or built-in name."""
    dotted = canonical(dotted)
    known = dotted.startswith(KNOWN_LIBRARIES)
    return Value(OBJECT_VALUE.kinds if known else OBJECT_VALUE.kinds | UNKNOWN, refs=(NameRef(dotted),))


def function_value(info: FunctionInfo) -> Value:
    """The value of a function of this file."""
    return Value(OBJECT_VALUE.kinds, refs=(FunctionRef(info),))


def tells_more(known: Value | None, merged: Value) -> bool:
    """Whether an attribute has to be looked at again: it may be a tensor, or a distributed one, and we did not
    know; or we took it for anything, and it is no tensor."""
    if merged.kinds & TENSOR:
        return known is None or not known.kinds & TENSOR or merged.level > known.level
    return known is None and not merged.kinds & UNKNOWN


def is_basic_index(index: ast.expr, value: Value) -> bool:
    """Whether an index surely makes a view: slices, numbers, None and ``...``."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    if all(isinstance(part, (ast.Slice, ast.Constant, ast.UnaryOp)) for part in parts):
        return True
    if isinstance(index, ast.Tuple):
        items = value.items or ()
        return len(items) == len(parts) and all(
            isinstance(part, ast.Slice) or not item.kinds & ~(NUMBER | NONE)
            for part, item in zip(parts, items)
        )
    return value.kinds == NUMBER


def is_self(value: Value) -> bool:
    """Whether a value is an instance of a class of this file."""
    return any(isinstance(ref, (Instance, SuperRef)) and ref.info is not None for ref in value.refs)


def unpacked(value: Value, targets: Sequence[ast.expr]) -> Iterable[Value]:
    """One value for each target of an unpacking."""
    starred = any(type(target) is ast.Starred for target in targets)
    if value.items is not None and len(value.items) == len(targets) and not starred:
        return value.items
    if value.kinds & SEQUENCE:
        return [value.elements()] * len(targets)
    if value.kinds & TENSOR:
        sure = value.sure if value.sure >= KNOWN else HINTED
        part = value.replaced(sure=sure, marks=value.marks & ~(FRESH | BORROWED | PARAMETER), split=None)
        return [part] * len(targets)
    return [UNKNOWN_VALUE] * len(targets)


def added_sequences(left: Value, right: Value) -> Value:
    """``list + list`` or ``list * n``."""
    if left.items is not None and right.items is not None:
        return sequence(*left.items, *right.items)
    if not right.kinds & SEQUENCE:
        return sequence_of(left.elements()) if left.kinds & SEQUENCE else left
    if not left.kinds & SEQUENCE:
        return sequence_of(right.elements())
    empty_left = not left.items and left.element is None
    return sequence_of(right.elements() if empty_left else join(left.elements(), right.elements()))


def augmented_result(flow: Flow, frame: Frame, value: Value, right: Value) -> Value:
    """What a name holds after ``name += right``."""
    if value.kinds & TENSOR:
        if value.kinds & (NUMBER | NONE) and right.kinds & TENSOR:
            return join(
                value.replaced(kinds=value.kinds & ~(NUMBER | NONE), const=UNKNOWN_VALUE.const), right
            )
        return value
    if value.kinds & NUMBER and right.kinds & TENSOR:
        return calls.tensor_result(flow, frame, (right,))
    if value.kinds & SEQUENCE:
        return added_sequences(value, right)
    if value.kinds == NUMBER:
        return NUMBER_VALUE if right.kinds == NUMBER else UNKNOWN_VALUE
    if value.kinds & UNKNOWN and right.kinds & TENSOR:
        return Value(TENSOR | UNKNOWN, max(frame.context, right.level), min(right.sure, ASSUMED), right.why)
    return value.replaced(const=UNKNOWN_VALUE.const) if value.kinds != TEXT else TEXT_VALUE


def tensor_attribute(flow: Flow, base: Value, name: str) -> Value | None:
    """An attribute that tensors have; None if they do not, or if the name alone does not show a tensor."""
    kind = flow.api.attribute_returns.get(name)
    if kind is None:
        if name in ("placements", "device_mesh", "placement", "sbp", "_spec"):
            return OBJECT_VALUE
        return None
    if kind == "size":
        return SHAPE_VALUE
    if kind == "number":
        return NUMBER_VALUE
    if kind != "tensor":
        return OBJECT_VALUE
    if not base.kinds & TENSOR:
        return Value(UNKNOWN, marks=DATA) if name == "data" else None
    marks = base.marks & ~PARAMETER
    if name == "data":
        marks |= DATA
    elif name in ("grad", "_grad"):
        marks = 0
    return Value(TENSOR, base.level, base.sure, base.why, marks, split=base.split if name == "data" else None)


def joined_names(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    """The names after two branches."""
    if one is other:
        return one
    merged = dict(one)
    for name, value in other.items():
        known = one.get(name)
        if known is None:
            merged[name] = value
        elif known is not value:
            merged[name] = join(known, value)
    return merged


# The kinds of expressions that ``Flow.release`` does something about.
RELEASED = frozenset(
    {ast.Name, ast.IfExp, ast.BoolOp, ast.Tuple, ast.List, ast.NamedExpr, ast.Starred, ast.Attribute}
)

Handler = Callable[[Flow, Any, Frame], Any]

STATEMENTS: dict[type[ast.AST], Handler] = {
    ast.Expr: Flow.run_expression,
    ast.Assign: Flow.run_assign,
    ast.AnnAssign: Flow.run_annotated,
    ast.AugAssign: Flow.run_augmented,
    ast.If: Flow.run_if,
    ast.For: Flow.run_loop,
    ast.AsyncFor: Flow.run_loop,
    ast.While: Flow.run_loop,
    ast.With: Flow.run_with,
    ast.AsyncWith: Flow.run_with,
    ast.Try: Flow.run_try,
    ast.Match: Flow.run_match,
    ast.Return: Flow.run_return,
    ast.Raise: Flow.run_end,
    ast.Break: Flow.run_exit,
    ast.Continue: Flow.run_exit,
    ast.Assert: Flow.run_assert,
    ast.Delete: Flow.run_delete,
    ast.Import: Flow.run_import,
    ast.ImportFrom: Flow.run_import_from,
    ast.Global: Flow.run_outer,
    ast.Nonlocal: Flow.run_outer,
    ast.FunctionDef: Flow.run_function,
    ast.AsyncFunctionDef: Flow.run_function,
    ast.ClassDef: Flow.run_class,
}
if hasattr(ast, "TryStar"):
    STATEMENTS[ast.TryStar] = Flow.run_try

EXPRESSIONS: dict[type[ast.AST], Handler] = {
    ast.Constant: Flow.constant,
    ast.Attribute: Flow.attribute,
    ast.Subscript: Flow.subscript,
    ast.Call: calls.call,
    ast.BinOp: Flow.binary,
    ast.UnaryOp: Flow.unary,
    ast.Compare: Flow.comparison,
    ast.BoolOp: Flow.boolean,
    ast.IfExp: Flow.conditional,
    ast.Tuple: Flow.display,
    ast.List: Flow.display,
    ast.Set: Flow.display,
    ast.Dict: Flow.dictionary,
    ast.Starred: Flow.starred,
    ast.ListComp: Flow.comprehension,
    ast.SetComp: Flow.comprehension,
    ast.GeneratorExp: Flow.comprehension,
    ast.DictComp: Flow.comprehension,
    ast.NamedExpr: Flow.walrus,
    ast.Lambda: Flow.function,
    ast.JoinedStr: Flow.text,
    ast.Await: Flow.awaited,
    ast.Yield: Flow.yielded,
    ast.YieldFrom: Flow.yielded_from,
    ast.Slice: Flow.slice,
    ast.Name: Flow.value,
}
for _kind in ast.expr.__subclasses__():
    EXPRESSIONS.setdefault(_kind, Flow.other)
