"""What the watch found, as data: one record for each line, module, operator, placements and outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SAFE = "safe"
CHANGED = "changed placement"
LOST = "lost"
WRONG = "wrong value"
REFUSED = "refused"
ERROR = "error"
BYPASSED = "bypassed"

OUTCOMES = {
    SAFE: "the tensor keeps its placement and holds what the out-of-place form gives",
    CHANGED: "the tensor's placement is another one afterwards",
    LOST: "the write did not reach the tensor, or not the tensors that share its memory",
    WRONG: "the out-of-place form gives another result under the same placements",
    REFUSED: "a clear error says that this is not supported",
    ERROR: "an error from deep inside",
    BYPASSED: "the local piece was written, which the distributed tensor cannot know of",
}
"""Every outcome and what it means."""
FAULTS = (LOST, CHANGED, WRONG)
"""The outcomes that are silent faults, the gravest first."""
_ORDER = (*FAULTS, ERROR, REFUSED, BYPASSED, SAFE)


@dataclass(frozen=True)
class Operand:
    """One tensor argument (or list of tensors) of a write.

    Attributes:
        name: as in the operator's schema: ``self``, ``other``.
        before, after: its placements, such as ``S(0)``; ``plain`` for a tensor that is not distributed. In a list,
            those that occur. The same text where nothing changed.
        written: whether the operator writes to it.
    """

    name: str
    before: str
    after: str
    written: bool = False

    def __str__(self) -> str:
        change = f" -> {self.after}" if self.after != self.before else ""
        return f"{self.name}: {self.before}{change}"


@dataclass(frozen=True)
class Record:
    """A write to a distributed tensor.

    Attributes:
        file, line, source: where it is and the text of that line; empty where no Python code is to be seen.
        function: the function that the line is in.
        module: the path of the module whose forward it is in (``layers.3.mlp``), or its class; empty outside of any.
        operator: ``aten.add_.Tensor``, ``.data =``, or what wrote to the local piece.
        operands: the tensors that took part.
        outcome: one of ``OUTCOMES``.
        message: why, in words.
        family: the known part of torch that wrote (``optimizer``, ``nn.init``, ...); empty for the user's own writes.
        compared: whether the out-of-place form was run to tell.
        count: how often it happened.
    """

    file: str
    line: int
    source: str
    function: str
    module: str
    operator: str
    operands: tuple[Operand, ...]
    outcome: str
    message: str = ""
    family: str = ""
    compared: bool = False
    count: int = 1

    @property
    def is_fault(self) -> bool:
        """Whether something is silently wrong."""
        return self.outcome in FAULTS

    @property
    def placements(self) -> str:
        """The operands' placements in words: ``self: S(0) -> B, other: B``."""
        return ", ".join(map(str, self.operands))

    def to_dict(self) -> dict[str, Any]:
        """The record as it goes into a results file (a line of kind ``inplace``)."""
        return {
            "kind": "inplace",
            "file": self.file,
            "line": self.line or None,
            "source": self.source,
            "function": self.function,
            "module": self.module,
            "operator": self.operator,
            "operands": [
                {"name": one.name, "before": one.before, "after": one.after, "written": one.written}
                for one in self.operands
            ],
            "placements": self.placements,
            "outcome": self.outcome,
            "message": self.message,
            "family": self.family,
            "compared": self.compared,
            "count": self.count,
        }

    def __str__(self) -> str:
        from sbp.inplace.stack import relative

        where = f"{relative(self.file)}:{self.line}" if self.file else f"({self.family or 'no Python code'})"
        words = [f"{self.outcome}: {self.source or self.operator}", f"  at {where}"]
        if self.module:
            words[-1] += f", in module {self.module}"
        words.append(
            f"  {self.operator}({self.placements})" + (f", {self.count} times" if self.count > 1 else "")
        )
        if self.message:
            words.append(f"  {self.message}")
        return "\n".join(words)


def in_order(records: Sequence[Record]) -> list[Record]:
    """The gravest first, then by place."""
    return sorted(records, key=lambda record: (_ORDER.index(record.outcome), record.file, record.line))


def listed(record: Record) -> bool:
    """Whether a report names the record; what a known part of torch did rightly is only summed up."""
    return not record.family or record.is_fault


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Counts of writes: in all, by outcome, by the known part of torch that made them, and lines that are wrong."""
    outcomes: Counter[str] = Counter()
    families: Counter[str] = Counter()
    for record in records:
        outcomes[record.outcome] += record.count
        if record.family:
            families[record.family] += record.count
    return {
        "writes": sum(outcomes.values()),
        "outcomes": {word: outcomes[word] for word in _ORDER if outcomes[word]},
        "families": dict(sorted(families.items())),
        "wrong lines": len({(record.file, record.line) for record in records if record.is_fault}),
    }


def report(records: Sequence[Record]) -> str:
    """All records in words: those that matter one by one, the known parts of torch as sums."""
    if not records:
        return "no write to a distributed tensor"
    summary = summarise(records)
    counts = ", ".join(f"{count} {word}" for word, count in summary["outcomes"].items())
    lines = [str(record) for record in in_order(records) if listed(record)]
    lines += [f"{family}: {count} writes" for family, count in summary["families"].items()]
    lines.append(f"{summary['writes']} writes to distributed tensors: {counts}")
    return "\n".join(lines)
