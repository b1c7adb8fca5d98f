"""Correct subjects, of which nothing may be called wrong: how many trials pass in silence.

- ``honest/``: per-rank code in many sizes, in float64, bfloat16, float16 and float32.
- the same folder's plans (tensor parallel, FSDP) and operators on DTensor, on one and two mesh axes.
- the built-in modules on DTensor, in the same precisions, at the quick level. What torch does wrong there stands with
  its reason among the known failures; those trials are no correct subjects and are not counted, nor are refusals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

HONEST = Path(__file__).resolve().parent / "honest"
DTYPES = ("float64", "bfloat16", "float16", "float32")
PARTS = {
    "honest": [str(HONEST / "random_sizes.py")],
    "plans": [str(HONEST / "plans_and_operators.py"), "--level", "quick"],
    "modules": ["--suite", "modules", "--level", "quick"],
}


@dataclass
class Silence:
    """``trials``: those that passed; ``low``: of these, below float64; ``alarms``: what was called wrong, in a line
    each; ``complete``: whether the runs came to their end."""

    trials: int = 0
    low: int = 0
    alarms: list[str] = field(default_factory=list)
    complete: bool = True


def run(folder: Path, budget: str | None = None, parts: Iterable[str] = tuple(PARTS)) -> int:
    """Run the parts on four ranks, or go on with runs that were stopped; the results are written to ``folder``. The
    largest exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in parts:
        targets, path = PARTS[name], folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "sbp.run", "-n", "4", "--no-watch", *targets]
        for dtype in DTYPES:
            command += ["--dtype", dtype]
        command += ["--resume" if path.exists() else "--results", str(path)]
        if budget is not None:
            command += ["--budget", budget]
        worst = max(worst, subprocess.run(command).returncode)
    return worst


def read(folder: Path) -> Silence:
    """What the results in ``folder`` say; the last verdict on a trial counts."""
    silence = Silence()
    for name in PARTS:
        path = folder / f"{name}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        verdicts = {record["id"]: record for record in records if record["kind"] == "verdict"}
        if not any(record["kind"] == "summary" for record in records):
            silence.complete = False
        for trial, record in verdicts.items():
            if record["known"] is not None:
                continue
            if record["verdict"] in ("pass", "noise"):
                silence.trials += 1
                silence.low += record["dtype"] != "float64"
            elif record["verdict"] not in ("refused", "no signal"):
                silence.alarms.append(f"{record['verdict']}: {trial}")
    return silence
