"""How many trials of the ops suite a second four ranks can do, and what bounds it.

    python benchmarks/ops.py [--seconds 60] [--cases 300]

Runs the suite on four ranks for a while. Beside it, in one process and with a fake process group, which moves no data:
the same trials as DTensors and nothing else - no comparison, no messages, no waiting. What that takes is DTensor's own
dispatch. Four ranks on C cores cannot be faster than C / (4 x that).
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

RANKS = 4


def run_suite(seconds: float) -> dict[str, Any]:
    """The summary of a run of so many seconds on real ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        command = [
            *(sys.executable, "-m", "sbp.run", "-n", str(RANKS), "--suite", "ops", "--mesh", str(RANKS)),
            *("--known", "none", "--budget", f"{seconds}s", "--results", str(results)),
        ]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=seconds + 120)
        summary: dict[str, Any] = json.loads(results.read_text().splitlines()[-1])
    return summary


def dispatch_alone(most: int) -> tuple[int, float, float]:
    """Run the trials of so many cases in one process: their number, the CPU seconds of DTensor's run of them, and the
    share of it that is DTensor's search for placements (sharding propagation)."""
    import torch
    from torch.distributed.tensor import DTensor

    from sbp.fake_world import fake_world
    from sbp.oracle.reference import compute_reference
    from sbp.placement import parse_mesh
    from sbp.plan import PlanOptions
    from sbp.subjects.dtensor import DTensorSubject
    from sbp.suites.operators import SUITE

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = parse_mesh(str(RANKS))
    profile = cProfile.Profile()
    seconds, count = {False: 0.0, True: 0.0}, 0
    every = [case for case in SUITE.cases() if ":" not in case]
    chosen = [every[number * len(every) // most] for number in range(min(most, len(every)))]
    with fake_world(RANKS):
        subject = DTensorSubject(0)
        for case, profiled in itertools.product(chosen, (False, True)):
            plan = list(SUITE.plan(case, PlanOptions((mesh,), rows=4)))
            if not plan:
                continue
            if profiled:
                # The search is kept by operator and placements: a second look must search again.
                DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
            program = SUITE.build(case, "float64", "cpu")
            reference = compute_reference(program, case, seed=1)
            for trial in plan:
                begin = time.process_time()
                if profiled:
                    profile.enable()
                try:
                    subject.run(program, case, mesh, trial.placements, reference.cotangents, {})
                except Exception:
                    pass  # a refusal costs time as well
                finally:
                    profile.disable()
                seconds[profiled] += time.process_time() - begin
                count += not profiled
    stats: Any = pstats.Stats(profile)
    inside = sum(
        cumulative
        for (_, _, name), (_, _, _, cumulative, _) in stats.stats.items()
        if name == "propagate_op_sharding_non_cached"
    )
    return count, seconds[False], inside / seconds[True]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the run on real ranks")
    parser.add_argument("--cases", type=int, default=300, help="how many cases are run in one process")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    summary = run_suite(options.seconds)
    ran = summary["verdicts"]
    rate = ran / summary["seconds"]
    print(f"{RANKS} ranks on {cores} cores: {ran} trials in {summary['seconds']:.1f} s = {rate:.0f} a second")
    for part in ("preparing", "subject", "harness"):
        print(f"  {part:10} {summary[part + '_seconds']:6.1f} s")
    count, seconds, share = dispatch_alone(options.cases)
    each = seconds / count
    print(f"DTensor alone, no data moved: {1e3 * each:.2f} ms of CPU a trial and rank ({count} trials)")
    print(f"  of it in sharding propagation: {share:.0%} (profiled)")
    bound = cores / (RANKS * each)
    print(
        f"  so at most {bound:.0f} trials a second (= {cores} cores / ({RANKS} ranks x {1e3 * each:.2f} ms))"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
