"""What a test tells of the names in it: ``isinstance``, ``is None``, and their combinations."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from sbp.inplace.lint.annotations import annotation_value
from sbp.inplace.lint.scopes import Frame
from sbp.inplace.lint.syntax import path_of
from sbp.inplace.lint.values import (
    CERTAIN,
    KNOWN,
    NONE,
    NONE_VALUE,
    OBJECT_VALUE,
    TENSOR,
    UNKNOWN_VALUE,
    Reason,
    Value,
)

if TYPE_CHECKING:
    from sbp.inplace.lint.flow import Flow


def narrow(flow: Flow, test: ast.expr, frame: Frame, truth: bool) -> None:
    """Change the names of a frame to what they are where ``test`` is true (or false)."""
    kind = type(test)
    if kind is ast.UnaryOp and type(test.op) is ast.Not:  # type: ignore[attr-defined]
        narrow(flow, test.operand, frame, not truth)  # type: ignore[attr-defined]
    elif kind is ast.BoolOp:
        if (type(test.op) is ast.And) == truth:  # type: ignore[attr-defined]
            for part in test.values:  # type: ignore[attr-defined]
                narrow(flow, part, frame, truth)
    elif kind is ast.Compare:
        narrow_comparison(flow, test, frame, truth)  # type: ignore[arg-type]
    elif kind is ast.Call:
        narrow_call(flow, test, frame, truth)  # type: ignore[arg-type]
    elif kind is ast.Name or kind is ast.Attribute:
        if truth:
            change(flow, test, frame, without(NONE))
    elif kind is ast.NamedExpr:
        narrow(flow, test.target, frame, truth)  # type: ignore[attr-defined]


def narrow_comparison(flow: Flow, test: ast.Compare, frame: Frame, truth: bool) -> None:
    """``x is None``, ``x is not None``, ``type(x) is DTensor``."""
    operator, other = test.ops[0], test.comparators[0]
    if len(test.ops) != 1:
        return
    if type(operator) in (ast.Is, ast.IsNot) and isinstance(other, ast.Constant) and other.value is None:
        left = test.left.target if isinstance(test.left, ast.NamedExpr) else test.left
        if truth == (type(operator) is ast.Is):
            change(flow, left, frame, lambda value: NONE_VALUE)
        else:
            change(flow, left, frame, without(NONE))
    elif type(operator) in (ast.Is, ast.Eq) and truth and isinstance(test.left, ast.Call):
        call = test.left
        if isinstance(call.func, ast.Name) and call.func.id == "type" and len(call.args) == 1:
            to_type(flow, call.args[0], other, frame, True)


def narrow_call(flow: Flow, test: ast.Call, frame: Frame, truth: bool) -> None:
    """``isinstance(x, T)``, ``torch.is_tensor(x)``."""
    function = test.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name == "isinstance" and len(test.args) == 2:
        to_type(flow, test.args[0], test.args[1], frame, truth)
    elif name == "is_tensor" and len(test.args) == 1:
        tensor = Value(TENSOR, frame.context, KNOWN)
        change(flow, test.args[0], frame, (lambda value: meet(value, tensor)) if truth else without(TENSOR))


def to_type(flow: Flow, subject: ast.expr, kind: ast.expr, frame: Frame, truth: bool) -> None:
    """The subject is (or is not) an instance of a type, or of one of a tuple of types."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    values = [annotation_value(flow, one, frame) for one in kinds]
    if not truth:
        # Not a DTensor: a plain tensor may be left. Not a tensor: none is.
        if len(values) == 1 and values[0] is not None and values[0].kinds == TENSOR:
            if values[0].level == CERTAIN:
                change(flow, subject, frame, not_distributed)
            else:
                change(flow, subject, frame, without(TENSOR))
        return
    if any(value is None for value in values):
        return
    if len(values) == 1:
        known = values[0]
        assert known is not None
        if known.level == CERTAIN:
            known = known.replaced(why=Reason("isinstance(..., DTensor)", subject.lineno))
        change(flow, subject, frame, lambda value: meet(value, known))
    elif not any(value is not None and value.kinds & TENSOR for value in values):
        merged = 0
        for value in values:
            merged |= value.kinds if value is not None else 0
        change(flow, subject, frame, lambda value: Value(value.kinds & merged or merged, element=value.element,
                                                         items=value.items, refs=value.refs,
                                                         entries=value.entries))  # fmt: skip


def change(flow: Flow, subject: ast.expr, frame: Frame, how: Callable[[Value], Value]) -> None:
    """Rebind a name, or an attribute of a name, to what is now known of it."""
    key = path_of(subject)
    if key is None:
        return
    value = flow.value(subject, frame)
    changed = how(value)
    if changed is not value:
        frame.bind_path(key, changed)


def without(bit: int) -> Callable[[Value], Value]:
    """A change that takes a kind away."""

    def drop(value: Value) -> Value:
        if not value.kinds & bit:
            return value
        if value.kinds == bit:
            return OBJECT_VALUE if bit == TENSOR else UNKNOWN_VALUE
        if bit == TENSOR:
            return value.replaced(kinds=value.kinds & ~bit, level=0, sure=0, marks=0, why=None)
        return value.replaced(kinds=value.kinds & ~bit)

    return drop


def not_distributed(value: Value) -> Value:
    """What is left of a value that is not a distributed tensor."""
    if value.level < CERTAIN:
        return value
    return value.replaced(level=0, why=None, marks=0, split=None)


def meet(value: Value, known: Value) -> Value:
    """A value of which a type is now known."""
    if known.kinds == TENSOR:
        if value.kinds & TENSOR and value.level >= known.level and value.sure >= KNOWN:
            return value if value.kinds == TENSOR else value.replaced(kinds=TENSOR)
        if value.kinds & TENSOR:
            return value.replaced(
                kinds=TENSOR,
                level=max(value.level, known.level),
                sure=KNOWN,
                why=value.why if value.level >= known.level else known.why,
            )
        return known
    kinds = value.kinds & known.kinds or known.kinds
    if value.kinds & known.kinds:
        return value.replaced(kinds=kinds) if kinds & TENSOR else Value(
            kinds, items=value.items, element=value.element, refs=value.refs, const=value.const, entries=value.entries
        )  # fmt: skip
    return known
