"""Turns in-place writes into out-of-place code, keeping every other character. The only module that needs libcst.

What may be turned is decided by the analysis (see ``keeping``); here it is only rewritten:

* ``x += y`` -> ``x = x + y``
* ``x.add_(y)`` -> ``x = x.add(y)``, or ``.add(y)`` where the result is used already
* ``torch.relu_(x)``, ``F.relu(x, inplace=True)`` -> ``x = torch.relu(x)``, ``x = F.relu(x)``
* ``nn.ReLU(inplace=True)`` -> ``nn.ReLU()``
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from sbp.inplace import table
from sbp.inplace.lint.analyse import lint_source
from sbp.inplace.lint.config import Configuration
from sbp.inplace.lint.files import decode
from sbp.inplace.lint.findings import UNREADABLE, Finding
from sbp.inplace.lint.knowledge import api
from sbp.inplace.lint.noqa import without_noqa

# What one fix makes fresh may allow another; in practice two rounds are enough.
MAX_ROUNDS = 10

OPERATORS: dict[type[cst.BaseAugOp], type[cst.BaseBinaryOp]] = {
    cst.AddAssign: cst.Add,
    cst.SubtractAssign: cst.Subtract,
    cst.MultiplyAssign: cst.Multiply,
    cst.DivideAssign: cst.Divide,
    cst.FloorDivideAssign: cst.FloorDivide,
    cst.ModuloAssign: cst.Modulo,
    cst.PowerAssign: cst.Power,
    cst.LeftShiftAssign: cst.LeftShift,
    cst.RightShiftAssign: cst.RightShift,
    cst.BitAndAssign: cst.BitAnd,
    cst.BitOrAssign: cst.BitOr,
    cst.BitXorAssign: cst.BitXor,
}
# Expressions that bind closer than any operator.
ATOMS = (
    cst.Name,
    cst.Attribute,
    cst.Call,
    cst.Subscript,
    cst.Integer,
    cst.Float,
    cst.Imaginary,
    cst.SimpleString,
    cst.List,
    cst.Dict,
    cst.Set,
)

Place = tuple[int, int]


@dataclass(frozen=True)
class Fixed:
    """The outcome for one file: its new bytes, what was fixed, and what was left with the reason in ``kept``."""

    data: bytes
    fixed: tuple[Finding, ...] = ()
    left: tuple[Finding, ...] = ()


def fix_bytes(data: bytes, path: str, configuration: Configuration) -> Fixed:
    """Fix one file's content. A file that cannot be read comes back as it is, with its one finding in ``left``."""
    fixed: list[Finding] = []
    left: list[Finding] = []
    for _ in range(MAX_ROUNDS):
        text = decode(data, path)
        if isinstance(text, Finding):
            return Fixed(data, left=(text,) if configuration.wants(text) else ())
        left = wanted_findings(text, path, configuration)
        fixable = {(f.line, f.column): f for f in left if f.level and not f.kept}
        if not fixable:
            break
        rewritten, done = rewrite(data, fixable)
        if not done or not parses(rewritten):
            break
        fixed += done
        data = rewritten
    return Fixed(data, tuple(fixed), tuple(explained(finding) for finding in left))


def explained(finding: Finding) -> Finding:
    """A finding that is left has a reason."""
    if finding.kept or finding.code == UNREADABLE:
        return finding
    changes: dict[str, Any] = {name: getattr(finding, name) for name in Finding.__dataclass_fields__}
    changes["kept"] = "it is written in a way that cannot be rewritten without changing more than the write"
    return Finding(**changes)


def wanted_findings(text: str, path: str, configuration: Configuration) -> list[Finding]:
    """The findings of a text that are reported; what is silenced is not fixed either."""
    findings = lint_source(text, path, frozenset(configuration.sources), thorough=True)
    return [f for f in without_noqa(findings, text, text.split("\n")) if configuration.wants(f)]


def parses(data: bytes) -> bool:
    """Whether what was written is still Python."""
    try:
        ast.parse(data)
    except (SyntaxError, ValueError):
        return False
    return True


def rewrite(data: bytes, fixable: dict[Place, Finding]) -> tuple[bytes, list[Finding]]:
    """The content with these findings turned, and those that were."""
    try:
        wrapper = MetadataWrapper(cst.parse_module(data), unsafe_skip_copy=True)
        rewriter = Rewriter(fixable)
        module = wrapper.visit(rewriter)
    except (cst.ParserSyntaxError, RecursionError):
        return data, []
    return module.bytes, list(rewriter.done.values())


@dataclass
class Rewriter(cst.CSTTransformer):
    """Rewrites the nodes that start where a finding does."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    fixable: dict[Place, Finding]
    done: dict[Place, Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def finding_at(self, node: cst.CSTNode) -> Finding | None:
        """The finding that points at a node (see ``writes.start_of``) and ends where it does."""
        position = self.get_metadata(PositionProvider, node)
        start = position.start
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            name = self.get_metadata(PositionProvider, node.func.attr).start
            if name.line != start.line:
                start = name
        finding = self.fixable.get((start.line, start.column))
        if finding is None or (finding.end_line, finding.end_column) != (
            position.end.line,
            position.end.column,
        ):
            return None
        return finding

    def mark(self, finding: Finding) -> None:
        """A finding was turned."""
        self.done[finding.line, finding.column] = finding

    def leave_AugAssign(
        self, original_node: cst.AugAssign, updated_node: cst.AugAssign
    ) -> cst.BaseSmallStatement:
        """``x += y``."""
        finding = self.finding_at(original_node)
        operator = OPERATORS.get(type(updated_node.operator))
        if finding is None or operator is None or not isinstance(updated_node.target, cst.Name):
            return updated_node
        self.mark(finding)
        whitespace = updated_node.operator
        target = cst.AssignTarget(
            updated_node.target,
            whitespace_before_equal=whitespace.whitespace_before,
            whitespace_after_equal=whitespace.whitespace_after,
        )
        value = cst.BinaryOperation(
            cst.Name(updated_node.target.value), operator(), in_parentheses(updated_node.value)
        )
        return cst.Assign([target], value, updated_node.semicolon)

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> cst.BaseSmallStatement:
        """A statement that was only a write needs its result bound: ``x.add_(y)``, ``F.relu(x, inplace=True)``."""
        finding = self.finding_at(original_node.value)
        if finding is None or (finding.line, finding.column) not in self.done:
            return updated_node
        if not finding.name:
            return updated_node
        target = cst.AssignTarget(cst.Name(finding.name))
        return cst.Assign([target], updated_node.value, updated_node.semicolon)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Calls: rename the method or function, or take the argument out."""
        finding = self.finding_at(original_node)
        if finding is None:
            return updated_node
        if finding.code == "SBP102":
            changed = renamed_chain(updated_node)
        elif finding.code == "SBP103":
            changed = without_inplace(updated_node)
        else:
            changed = None
        if changed is None:
            return updated_node
        self.mark(finding)
        return changed


def in_parentheses(value: cst.BaseExpression) -> cst.BaseExpression:
    """A right-hand side as an operand: in parentheses unless it binds closely by itself."""
    if isinstance(value, ATOMS) or value.lpar:
        return value
    return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def renamed_chain(node: cst.Call) -> cst.Call | None:
    """``x.mul_(2).add_(1)`` -> ``x.mul(2).add(1)``; ``torch.relu_(x)`` -> ``torch.relu(x)``."""
    function = node.func
    if not isinstance(function, cst.Attribute):
        return None
    name = function.attr.value
    functional = table.functional_method(name) or functional_function(name)
    if functional is None:
        return None
    inner = function.value
    if isinstance(inner, cst.Call) and is_write(inner.func):
        inner = renamed_chain(inner) or inner
    return node.with_changes(
        func=function.with_changes(value=inner, attr=function.attr.with_changes(value=functional))
    )


def is_write(function: cst.BaseExpression) -> bool:
    """Whether a method is one that writes."""
    return isinstance(function, cst.Attribute) and table.functional_method(function.attr.value) is not None


def functional_function(name: str) -> str | None:
    """The function that does out of place what a function with a trailing underscore does."""
    for module in ("torch", "torch.nn.functional"):
        entry = api().functions.get(f"{module}.{name}")
        if entry is not None and "functional" in entry:
            return str(entry["functional"])
    return None


def without_inplace(node: cst.Call) -> cst.Call | None:
    """The call without ``inplace=True``."""
    arguments = list(node.args)
    for position, argument in enumerate(arguments):
        if argument.keyword is not None and argument.keyword.value == "inplace":
            return node.with_changes(args=removed(arguments, position))
    # By position, and the last of the arguments.
    if arguments and isinstance(arguments[-1].value, cst.Name) and arguments[-1].value.value == "True":
        return node.with_changes(args=removed(arguments, len(arguments) - 1))
    return None


def removed(arguments: Sequence[cst.Arg], position: int) -> list[cst.Arg]:
    """The arguments without one; the comma before a removed last one goes too, its line breaks stay."""
    kept = [argument for index, argument in enumerate(arguments) if index != position]
    if kept and position == len(arguments) - 1:
        last = arguments[position]
        kept[-1] = kept[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return kept
