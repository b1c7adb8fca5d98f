"""The rules: a code, what it says, why it matters, what to do; each with a bad and a good example file.

The examples lie beside this module as ``sbp101_bad.py.txt`` and ``sbp101_good.py.txt``. ``--explain`` prints them and
the tests lint them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sbp.inplace.lint.findings import UNREADABLE


@dataclass(frozen=True)
class Rule:
    """One rule. ``summary`` is a noun phrase, ``why`` what goes wrong, ``instead`` what to write."""

    code: str
    name: str
    summary: str
    why: str
    instead: str

    @cached_property
    def bad(self) -> str:
        """An example that the rule finds."""
        return self._example("bad")

    @cached_property
    def good(self) -> str:
        """The same done so that the rule is silent."""
        return self._example("good")

    def _example(self, kind: str) -> str:
        path = Path(__file__).with_name(f"{self.code.lower()}_{kind}.py.txt")
        return path.read_text(encoding="utf-8") if path.exists() else ""


_RULES = (
    Rule(
        UNREADABLE,
        "unreadable-file",
        "a file that cannot be linted",
        "It does not parse, is not UTF-8, is too large, or is a link that leads nowhere. The other files are linted.",
        "Repair the file, or leave it out with `exclude` in [tool.sbp.lint].",
    ),
    Rule(
        "SBP101",
        "augmented-assignment",
        "augmented assignment to a distributed tensor",
        "`x += y` keeps x's memory, so it must keep x's placement; whatever y needs has to bend to it. Frameworks "
        "get this wrong: values multiplied by the number of ranks, replicas that differ, writes that are refused.",
        "Write `x = x + y`: the result gets the placement that the operator infers.",
    ),
    Rule(
        "SBP102",
        "underscore-method",
        "method or function with a trailing underscore on a distributed tensor",
        "`x.add_(y)` writes into x and must keep its placement, as `x += y` must; `x.transpose_()` and its like "
        "change which dimension a placement means.",
        "Use the method without underscore and bind its result: `x = x.add(y)`.",
    ),
    Rule(
        "SBP103",
        "inplace-argument",
        "inplace=True of a function or a module",
        "It writes into its input, which is a distributed tensor once the model is parallelised; a view of it or "
        "what autograd saved changes with it.",
        "Leave `inplace` out: it saves little memory once activations are checkpointed or sharded.",
    ),
    Rule(
        "SBP104",
        "out-argument",
        "out= that names a distributed tensor",
        "The operator infers a placement for its result, but the tensor given as out= has one already: it is "
        "refused, or the local pieces are written as if the two were the same.",
        "Use the result that the operator returns.",
    ),
    Rule(
        "SBP105",
        "item-assignment",
        "assignment to items of a distributed tensor",
        "`x[i] = v` writes through a view. Where a placement splits the dimension that is indexed, only some ranks "
        "own the items, and the view may be a copy: the write is lost or refused.",
        "Build the result out of place: torch.where, torch.cat, index_put, slice_scatter, or write before the tensor "
        "is distributed.",
    ),
    Rule(
        "SBP106",
        "data-attribute",
        "assignment to .data, or a write through it",
        "`.data` passes by autograd and, in a distributed tensor, by the placement: `x.data = t` may be lost or put "
        "a tensor with another placement under the same name.",
        "Write under torch.no_grad() with copy_() of a tensor with the same placement, or make a new tensor.",
    ),
    Rule(
        "SBP107",
        "foreach",
        "torch._foreach_..._ or a fused kernel on distributed tensors",
        "One call writes into a whole list of tensors, whose placements may differ; each has to keep its own.",
        "Use the form without trailing underscore, or loop over the tensors.",
    ),
    Rule(
        "SBP108",
        "local-write",
        "write through to_local() or _local_tensor",
        "The local piece shares its memory with the distributed tensor. A write to it changes one rank's piece: "
        "replicas then differ, and no check or hook of the framework sees it.",
        "Work on a clone and put the result together with DTensor.from_local, or write to the distributed tensor.",
    ),
    Rule(
        "SBP109",
        "split-view-write",
        "write to a view that cuts a dimension which is split over ranks",
        "`x[:2].zero_()` on S(0) asks for rows that live on some ranks only. The view is made by redistributing, so "
        "it is a copy, and the write never reaches x.",
        "Redistribute to a placement that leaves that dimension whole, or build the result with torch.where.",
    ),
)

RULES: dict[str, Rule] = {rule.code: rule for rule in _RULES}
"""All rules by code."""


def explain(code: str) -> str:
    """The text that ``sbp lint --explain CODE`` prints. Raises KeyError for an unknown code."""
    rule = RULES[code]
    parts = [f"{rule.code} {rule.name}: {rule.summary}", "", rule.why, "", f"Instead: {rule.instead}"]
    if rule.bad:
        parts += ["", "Bad:", "", indent(rule.bad), "", "Good:", "", indent(rule.good)]
    return "\n".join(parts)


def indent(text: str) -> str:
    """A text set off by four spaces."""
    return "\n".join(f"    {line}" if line else "" for line in text.rstrip("\n").split("\n"))
