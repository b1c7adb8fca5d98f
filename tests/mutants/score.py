"""How many planted faults are found, and how many are named: ``python -m tests.mutants.score``.

Every fault and its correct counterpart runs on four ranks. Exit 1 unless all are detected, 95 % are named right (the
first finding is the planted place's quantity) and no correct case is called wrong.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbp.placement import parse_mesh
from sbp.plan import PlanOptions
from sbp.ranks import Ranks
from sbp.suites.users import UserSuite, normalise_target

FILE = Path(__file__).resolve().parent / "planted_cases.py"
OPTIONS = PlanOptions((parse_mesh("4"),), rows=4)
WRONG = ("wrong value", "wrong gradient", "wrong state", "wrong layout", "ranks disagree")


@dataclass
class Score:
    planted: int = 0
    detected: int = 0
    named: int = 0
    correct: int = 0
    misses: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.detected == self.planted and self.named >= 0.95 * self.planted and not self.alarms


def first_quantity(record: dict[str, Any]) -> str:
    findings = record.get("findings") or [{}]
    return str(findings[0].get("quantity", ""))


def measure() -> Score:
    sys.path.insert(0, str(FILE.parent))
    from planted_cases import MUTANTS, RIGHT

    suite = UserSuite(normalise_target(str(FILE)))
    ranks = Ranks(4, timeout=120.0)
    score = Score()

    def records(case: str) -> list[dict[str, Any]]:
        return [ranks.run(trial) for trial in suite.plan(case, OPTIONS)]

    try:
        for name in RIGHT:
            found = records(name)
            score.correct += len(found)
            if not found or any(record["verdict"] != "pass" for record in found):
                score.alarms.append(f"{name}: {[record['verdict'] for record in found]}")
        for mutant in MUTANTS:
            score.planted += 1
            found = records(mutant.planted.name)
            name = f"{mutant.planted.name} ({mutant.category})"
            if not found or any(record["verdict"] not in WRONG for record in found):
                score.misses.append(f"not detected: {name}: {[record['verdict'] for record in found]}")
                continue
            score.detected += 1
            quantities = {first_quantity(record) for record in found}
            named = all(
                q == mutant.quantity or q.startswith(mutant.quantity + " of step") for q in quantities
            )
            score.named += named
            if not named:
                score.misses.append(f"named otherwise: {name}: {quantities}, not {mutant.quantity}")
    finally:
        ranks.close()
    return score


def main() -> int:
    score = measure()
    print(f"detected {score.detected} of {score.planted} ({score.detected / score.planted:.0%})")
    print(f"named right {score.named} of {score.planted} ({score.named / score.planted:.0%})")
    print(f"{len(score.alarms)} false alarms in {score.correct} correct trials")
    for line in (*score.misses, *score.alarms):
        print(f"  {line}")
    return 0 if score.good else 1


if __name__ == "__main__":
    sys.exit(main())
