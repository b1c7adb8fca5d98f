"""How many planted faults are found, and how many are named: ``python -m tests.mutants.score``.

Every fault and its correct counterpart runs on four ranks. Exit 1 unless all are detected, 95 % are named right (the
first finding is the planted place's quantity) and no correct case is called wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbp.placement import parse_mesh
from sbp.plan import PlanOptions
from sbp.ranks import Ranks
from sbp.suites.users import UserSuite, load_module, normalise_target
from sbp.trial import Trial
from tests.mutants import silence

FOLDER = Path(__file__).resolve().parent / "subjects"
WRONG = ("wrong value", "wrong gradient", "wrong state", "wrong layout", "ranks disagree", "lost write")
HONEST = ("pass", "noise")
TIMEOUT = 120.0

Run = Callable[[Trial], dict[str, Any]]


@dataclass
class Score:
    """What came of the planted faults and of their correct counterparts.

    Attributes:
        planted, detected, named: numbers of faults; ``kinds``: how many of each kind are planted.
        correct: trials of correct cases.
        misses: what was not detected, or named otherwise, in a line each.
        alarms: the correct trials that did not pass.
        explained: faults that rounding explains; nobody can find them, so they are only named here.
    """

    planted: int = 0
    detected: int = 0
    named: int = 0
    correct: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.detected == self.planted and self.named >= 0.95 * self.planted and not self.alarms


def first_quantity(record: dict[str, Any]) -> str:
    findings = record.get("findings") or [{}]
    return str(findings[0].get("quantity", ""))


def is_named(quantity: str, due: str) -> bool:
    """Whether the quantity is the one that is due, in whatever step."""
    return quantity == due or quantity.startswith((f"{due} of step ", f"{due} after step "))


def options(dtype: str) -> PlanOptions:
    return PlanOptions((parse_mesh("4"),), rows=4, dtypes=(dtype,))


def measure(only: str = "") -> Score:
    """Run all that is planted, or the files and faults whose name has ``only`` in it."""
    score = Score()
    ranks = Ranks(4, timeout=TIMEOUT)
    try:
        for path in sorted(FOLDER.glob("*.py")):
            planted = getattr(load_module(str(path)), "PLANTED", None)
            if planted is not None:
                measure_file(UserSuite(normalise_target(str(path))), planted, ranks.run, score, only)
    finally:
        ranks.close()
    return score


def measure_file(suite: UserSuite, planted: Any, run: Run, score: Score, only: str) -> None:
    def records(case: str, dtype: str) -> list[dict[str, Any]]:
        return [run(trial) for trial in suite.plan(case, options(dtype))]

    for case, dtype in planted.right:
        if only not in f"{suite.name}/{case.name}":
            continue
        found = records(case.name, dtype)
        score.correct += len(found)
        wrong = [record for record in found if record["verdict"] not in HONEST]
        if wrong or not found:
            score.alarms.append(f"{case.name}: {[describe(record) for record in wrong]}")
    for mutant in planted.mutants:
        if only not in f"{suite.name}/{mutant.planted.name}":
            continue
        if mutant.explained:
            score.explained.append(mutant.planted.name)
            continue
        score.planted += 1
        score.kinds[mutant.kind] = score.kinds.get(mutant.kind, 0) + 1
        found = records(mutant.planted.name, mutant.dtype)
        name = f"{mutant.planted.name} ({mutant.kind})"
        wrong = [record for record in found if record["verdict"] in WRONG]
        if not wrong:
            score.misses.append(f"not detected: {name}: {[describe(record) for record in found]}")
            continue
        score.detected += 1
        quantities = {first_quantity(record) for record in wrong}
        if all(is_named(quantity, mutant.quantity) for quantity in quantities):
            score.named += 1
        else:
            score.misses.append(f"named otherwise: {name}: {sorted(quantities)}, not {mutant.quantity}")


def describe(record: dict[str, Any]) -> str:
    finding = (record.get("findings") or [{}])[0]
    return f"{record['verdict']} {finding.get('quantity', '')}: {finding.get('relation', '')}"


def print_silence(folder: Path) -> bool:
    """Whether there were no alarms."""
    found = silence.read(folder)
    low = f"{found.low} of them below float64"
    print(f"{len(found.alarms)} false alarms in {found.trials} trials of correct subjects ({low})")
    for line in found.alarms:
        print(f"  {line}")
    if not found.complete:
        print(f"the run is incomplete: the same command goes on with {folder}")
    return not found.alarms and found.complete


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.score", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="files and faults with this in their name")
    parser.add_argument(
        "--silence", type=Path, metavar="FOLDER", help="thousands of trials of correct subjects too"
    )
    parser.add_argument("--budget", help="stop each part of the silence after this long; run again to go on")
    arguments = parser.parse_args()
    score = measure(arguments.only)
    if not score.planted:
        parser.error(f"nothing planted has {arguments.only!r} in its name")
    print(f"detected {score.detected} of {score.planted} ({score.detected / score.planted:.0%})")
    print(f"named right {score.named} of {score.planted} ({score.named / score.planted:.0%})")
    print(f"{len(score.alarms)} false alarms in {score.correct} trials of the correct counterparts")
    if score.explained:
        print(f"not counted, since rounding explains them: {', '.join(score.explained)}")
    for line in (*score.misses, *score.alarms):
        print(f"  {line}")
    if arguments.silence is not None:
        silence.run(arguments.silence, arguments.budget)
        return 0 if print_silence(arguments.silence) and score.good else 1
    return 0 if score.good else 1


if __name__ == "__main__":
    sys.exit(main())
