"""How long from ``mpirun`` to the first verdict, beside what four bare ranks need for the same beginnings.

    python benchmarks/startup.py [--ranks 4] [--rounds 5]

The bare job imports torch.distributed.tensor, joins a process group and multiplies two DTensors; ours is the default
run, stopped after its first verdict. Both are started in turn, several times, and the medians are compared, so that a
busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.spawn import find_mpirun

BARE = """
import os, time
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

world = MPI.COMM_WORLD
store = dist.TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False) if world.rank == 0 else None
port = world.bcast(store.port if store else None)
store = store or dist.TCPStore("127.0.0.1", port, world.size, False)
dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
mesh = init_device_mesh("cpu", (world.size,))
one = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
other = DTensor.from_local(torch.ones(8, 4), mesh, [Replicate()], run_check=False)
(one @ other).to_local()
if world.rank == 0:
    open(os.environ["DONE"], "w").write("done")
world.Barrier()
"""


def time_until(command: list[str], reached: Path, text: str, environment: dict[str, str]) -> float:
    """Seconds from starting ``command`` until ``text`` stands in the file; the job is then ended."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            if reached.exists() and text in reached.read_text():
                return time.perf_counter() - begin
            if process.poll() is not None and not reached.exists():
                raise SystemExit(f"{' '.join(command)} ended without getting there")
            if time.perf_counter() - begin > 300:
                raise SystemExit("nothing happened within five minutes")
            time.sleep(0.005)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    mpirun = find_mpirun()
    if mpirun is None:
        raise SystemExit("there is no mpirun here; pip install mpich")
    start = [mpirun, "-n", str(options.ranks), sys.executable]
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            done, results = Path(folder, f"done{number}"), Path(folder, f"results{number}.jsonl")
            one = time_until([*start, "-c", BARE], done, "done", {"DONE": str(done), "OMP_NUM_THREADS": "1"})
            command = [*start, "-m", "sbp.run", "--results", str(results)]
            other = time_until(command, results, '"kind": "verdict"', {})
            if number:  # the first round warms the file cache
                bare.append(one)
                ours.append(other)
    ratios = [other / one for one, other in zip(bare, ours, strict=True)]
    print(
        json.dumps(
            {
                "bare_seconds": round(statistics.median(bare), 2),
                "first_verdict_seconds": round(statistics.median(ours), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
        )
    )


if __name__ == "__main__":
    main()
