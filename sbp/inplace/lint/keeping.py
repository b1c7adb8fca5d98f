"""Why a write cannot be turned into out-of-place code without changing what the program means.

Every function returns the reason, or an empty text when it can. A write to a name becomes an assignment to that name,
which is the same only when nothing else refers to the memory (the value is fresh), and when the name is not read
again in the same statement with its old or its new value in mind.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from sbp.inplace import table
from sbp.inplace.lint.scopes import Frame
from sbp.inplace.lint.syntax import source
from sbp.inplace.lint.values import BORROWED, FRESH, Value

if TYPE_CHECKING:
    from sbp.inplace.lint.flow import Flow

NOT_A_NAME = "what is written to is not a plain name, so another reference to it may be read later"
OTHER_FORM = "it is called in a way that has no out-of-place form"
TWO_NAMES = "its result goes to another place while the name that is written to lives on"
READ_TWICE = "the name is read more than once in the statement, before and after the write"


def shared(name: str) -> str:
    """The reason for a name whose memory something else may refer to."""
    return f"`{name}` may share its memory with another name, a caller's tensor or something stored"


def attribute(node: ast.expr) -> str:
    """The reason for an attribute."""
    return f"`{source(node)}` is an attribute: others may hold the tensor that it refers to"


def kept_name(frame: Frame, name: str) -> str:
    """A name of a frame: it must be the frame's own, and hold the only reference."""
    if name in frame.outer_names:
        return f"`{name}` belongs to an enclosing scope"
    value = frame.names.get(name)
    if value is None:
        return f"`{name}` belongs to an enclosing scope"
    return "" if value.marks & FRESH else shared(name)


def kept_augmented(frame: Frame, node: ast.AugAssign) -> str:
    """``x += y`` -> ``x = x + y``."""
    target = node.target
    if isinstance(target, ast.Attribute):
        return attribute(target)
    if not isinstance(target, ast.Name):
        return NOT_A_NAME
    reason = kept_name(frame, target.id)
    if not reason and changes_dtype(node.value):
        return "the right-hand side has a dtype of its own, to which `x = x + y` would promote"
    return reason


def changes_dtype(node: ast.expr) -> bool:
    """Whether an expression ends in a visible conversion to another dtype."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name = node.func.attr
    return name in ("float", "double", "half", "bfloat16") or (
        name == "to" and "float" in "".join(ast.unparse(argument) for argument in node.args)
    )


def kept_method(flow: Flow, frame: Frame, base: Value, call: ast.Call, receiver: ast.expr | None) -> str:
    """``x.add_(y)`` -> ``x = x.add(y)``, also in a chain; on a temporary only the method is renamed."""
    if not isinstance(call.func, ast.Attribute) or receiver is not call.func.value:
        return OTHER_FORM
    name = call.func.attr
    if name.startswith("__") or table.functional_method(name) is None:
        return f"there is no out-of-place method for `{name}`"
    if isinstance(receiver, ast.Attribute):
        return attribute(receiver)
    root = chain_root(receiver)
    if root is not None:
        reason = kept_name(frame, root)
        if (
            isinstance(receiver, ast.Call)
            and base.marks & (FRESH | BORROWED)
            and root not in frame.outer_names
        ):
            # The link before has lent the name out for this statement.
            reason = ""
        return reason or kept_result(flow.statement, root, call)
    if base.marks & BORROWED or not base.marks & FRESH:
        return (
            NOT_A_NAME
            if isinstance(receiver, ast.Subscript)
            else "what is written to may have other references"
        )
    return ""


def kept_module(flow: Flow, frame: Frame, call: ast.Call, value: Value, written: ast.expr | None) -> str:
    """``module(x)`` where the module was told to work in place: its constructor is fixed, not the call."""
    if isinstance(written, ast.Name) and isinstance(flow.statement, ast.Expr):
        return "it is called for its write alone: the result is not used"
    return kept_function(flow, frame, call, value, written)


def chain_root(node: ast.expr) -> str | None:
    """The name at the start of ``x.mul_(2).add_(1)``, whose links all write to it; None for anything else."""
    while (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and table.functional_method(node.func.attr) is not None
    ):
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else None


def kept_function(flow: Flow, frame: Frame, call: ast.Call, value: Value, written: ast.expr | None) -> str:
    """``torch.relu_(x)`` -> ``x = torch.relu(x)``, ``F.relu(x, inplace=True)`` -> ``x = F.relu(x)``."""
    if isinstance(written, ast.Name):
        return kept_name(frame, written.id) or kept_result(flow.statement, written.id, call)
    if isinstance(written, ast.Attribute):
        return attribute(written)
    if written is None or not value.marks & FRESH:
        return NOT_A_NAME
    return ""


def plain_name(node: ast.expr | None) -> str:
    """The name that an expression is; empty for any other expression."""
    return node.id if isinstance(node, ast.Name) else ""


def kept_result(statement: ast.stmt | None, name: str, call: ast.Call) -> str:
    """Where the result of the call goes: nowhere, back to the same name, or out of the function."""
    if isinstance(statement, ast.Expr):
        if not is_link(statement.value, call):
            return OTHER_FORM
        # The links of a chain see the name after the write before them.
        single = statement.value is call
        return "" if single and not chained(call) else only_read_once(statement.value, name)
    if isinstance(statement, ast.Return) and statement.value is not None:
        return only_read_once(statement.value, name)
    if isinstance(statement, ast.Assign):
        targets = statement.targets
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name:
            return only_read_once(statement.value, name)
    return TWO_NAMES


def is_link(expression: ast.expr, call: ast.Call) -> bool:
    """Whether a call is an expression itself, or a link of the chain of writes that it is."""
    node: ast.expr = expression
    while node is not call:
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and table.functional_method(node.func.attr) is not None
        ):
            return False
        node = node.func.value
    return True


def chained(call: ast.Call) -> bool:
    """Whether a method is called on the result of a call."""
    return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call)


def only_read_once(expression: ast.expr, name: str) -> str:
    """A statement that reads a name twice may read it before and after the write."""
    reads = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(expression))
    return "" if reads == 1 else READ_TWICE
