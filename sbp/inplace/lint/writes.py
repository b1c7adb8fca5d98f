"""Which writes are reported, with which code, how surely, and whether they can be turned into out-of-place code."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from sbp.inplace.lint.findings import Finding, Related
from sbp.inplace.lint.values import (
    ASSUMED,
    CERTAIN,
    DATA,
    HINTED,
    KNOWN,
    LEVEL_NAMES,
    LIKELY,
    LOCAL,
    MAPPING,
    NONE,
    NUMBER,
    OBJECT,
    SEQUENCE,
    SPLIT_VIEW,
    TENSOR,
    TEXT,
    UNKNOWN,
    Reason,
    Value,
)

AUGMENTED, METHOD, INPLACE, OUT, ITEM, DATA_WRITE, FOREACH, LOCAL_WRITE, SPLIT_WRITE = (
    f"SBP10{n}" for n in range(1, 10)
)

# Right-hand sides that no tensor takes in an augmented assignment, or hardly.
NOT_OPERANDS = SEQUENCE | MAPPING | TEXT | NONE
# Values that are surely no tensor.
NOT_TENSORS = SEQUENCE | MAPPING | TEXT | NONE | NUMBER | OBJECT


@dataclass
class Record:
    """One write while the analysis runs; the same line may be reached several times."""

    node: ast.AST
    code: str
    level: int
    message: str
    why: Reason | None
    place: str
    kept: str
    related: set[Related] = field(default_factory=set)
    placed: bool = True
    name: str = ""


class Writes:
    """Collects the writes of one file."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int, str], Record] = {}

    def add(
        self,
        node: ast.AST,
        code: str,
        value: Value,
        context: int,
        message: str,
        kept: str,
        place: str,
        placed: bool = True,
        name: str = "",
    ) -> None:
        """Report a write to ``value``; the surest of several reports of the same place wins.

        ``kept`` is why it cannot be fixed; ``placed`` is False until it is seen what the reported module writes to;
        ``name`` is the plain name that is written to.
        """
        level = CERTAIN if value.level == CERTAIN else context
        if level < LIKELY:
            return
        if value.level == CERTAIN:
            if value.marks & SPLIT_VIEW:
                code = SPLIT_WRITE
            elif value.marks & LOCAL:
                code = LOCAL_WRITE
        if value.marks & DATA and code in (AUGMENTED, METHOD, ITEM, INPLACE, OUT):
            code = DATA_WRITE
        key = (*start_of(node), code)
        why = value.why if level == CERTAIN else None
        if not kept and code in (LOCAL_WRITE, SPLIT_WRITE, DATA_WRITE):
            kept = "it reaches memory behind the distributed tensor, which an assignment to a name would not"
        known = self.records.get(key)
        if known is None:
            self.records[key] = Record(node, code, level, message, why, place, kept, set(), placed, name)
            return
        if end_of(node) > end_of(known.node):
            # A chain, x.mul_(2).add_(1), is one finding: the whole of it.
            known.node, known.message = node, message
        if level > known.level:
            known.level, known.why, known.place = level, why, place
        known.kept = known.kept or kept

    def called(self, key: tuple[int, int, str], line: int, kept: str) -> None:
        """A module that works in place, reported where it is made, is called at this line."""
        record = self.records.get(key)
        if record is None:
            return
        record.placed = True
        record.kept = record.kept or kept
        if line != key[0]:
            record.related.add(Related(line, "called here"))

    def placed(self, key: tuple[int, int, str]) -> None:
        """A module that works in place follows, in a Sequential, one that makes a new tensor."""
        record = self.records.get(key)
        if record is not None:
            record.placed = True

    def findings(self, path: str, lines: list[str]) -> list[Finding]:
        """The reports as findings, in the order of the file."""
        found = []
        for record in self.records.values():
            node = record.node
            line, offset = start_of(node)
            end_line = node.end_lineno  # type: ignore[attr-defined]
            column = character_column(lines, line, offset)
            end_column = character_column(lines, end_line, node.end_col_offset)  # type: ignore[attr-defined]
            level = LEVEL_NAMES[record.level]
            because = f"{level}: {reason_text(record)}"
            found.append(
                Finding(
                    path,
                    line,
                    column,
                    end_line,
                    end_column,
                    record.code,
                    level,
                    f"{record.message} ({because})",
                    record.kept or ("" if record.placed else "what it is called on is not seen in this file"),
                    record.name,
                    tuple(sorted(record.related)),
                )
            )
        return sorted(found)


def start_of(node: ast.AST) -> tuple[int, int]:
    """Where a finding points: at the start of what writes, but in a call that is spread over lines at the line of
    the method's name, which is the line that Python gives too."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        function = node.func
        if function.end_lineno is not None and function.end_lineno != node.lineno:
            return function.end_lineno, (function.end_col_offset or 0) - len(function.attr.encode())
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def end_of(node: ast.AST) -> tuple[int, int]:
    """Where a node ends."""
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def reason_text(record: Record) -> str:
    """Why the lint holds the written value for a distributed tensor."""
    if record.why is not None:
        where = "" if record.why.line in (0, start_of(record.node)[0]) else f", line {record.why.line}"
        return f"{record.why.text}{where}"
    return f"a tensor in {record.place}"


def character_column(lines: list[str], line: int, offset: int) -> int:
    """The column in characters of an offset in bytes, which is what ``ast`` gives."""
    if not 1 <= line <= len(lines):
        return offset
    text = lines[line - 1]
    if text.isascii():
        return offset
    return len(text.encode("utf-8")[:offset].decode("utf-8", "replace"))


def augmented_hits(value: Value, right: Value, context: int) -> bool:
    """Whether ``value += right`` writes to a tensor, as far as can be told."""
    if not right.kinds & ~NOT_OPERANDS:
        return False
    if value.kinds & TENSOR:
        if value.level == CERTAIN or value.sure >= ASSUMED:
            return True
        return value.sure >= HINTED and is_tensor_operand(right)
    return bool(value.kinds & UNKNOWN and context >= LIKELY and right.kinds & TENSOR and right.sure >= KNOWN)


def is_tensor_operand(right: Value) -> bool:
    """Whether an operand is itself, more likely than not, a tensor."""
    return bool(right.kinds & TENSOR and right.sure >= HINTED)


def item_hits(value: Value, index: ast.expr, index_value: Value, context: int) -> bool:
    """Whether ``value[index] = ...`` writes to a tensor, as far as can be told."""
    if index_value.kinds == TEXT:
        return False
    if value.kinds & TENSOR and (value.level == CERTAIN or value.sure >= KNOWN):
        return True
    if not value.kinds & (TENSOR | UNKNOWN) or context < LIKELY:
        return False
    if index_value.kinds & TENSOR and index_value.sure >= KNOWN and index_value.kinds == TENSOR:
        return True
    if isinstance(index, ast.Tuple):
        return any(
            isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and part.value is ...)
            for part in index.elts
        )
    if isinstance(index, ast.Constant) and index.value is ...:
        return True
    return isinstance(index, ast.Slice) and bool(value.kinds & TENSOR) and value.sure >= ASSUMED


def method_hits(value: Value, context: int) -> bool:
    """Whether ``value.add_(...)`` writes to a tensor: nearly always, since no other type has such names."""
    if value.kinds & TENSOR:
        return True
    return bool(value.kinds & UNKNOWN) and context >= LIKELY
