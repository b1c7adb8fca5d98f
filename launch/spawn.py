"""Start ranks from a single process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def find_mpirun() -> str | None:
    """The mpirun of this environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def spawn(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``python ARGUMENTS`` on so many ranks through mpirun and wait; its exit code.

    Prints one line and returns 2 where there is no mpirun.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        print("launch: there is no mpirun here; pip install mpich", file=sys.stderr)
        return 2
    environment = {
        **os.environ,
        # Open MPI asks for these where root or more ranks than cores are meant; MPICH does not look at them.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    process = subprocess.Popen([mpirun, "-n", str(ranks), sys.executable, *arguments], env=environment)

    def hand_on(number: int, frame: object) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM,)}
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the terminal sent it to mpirun as well; its ranks write what they have
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
