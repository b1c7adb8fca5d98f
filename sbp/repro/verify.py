"""Runs a script under torchrun, as whoever is given it will."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Under these a rank is what it is under the launcher of sbp.run; the rest of the environment is the caller's.
_NOT_INHERITED = ("PYTHONHASHSEED", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """How a script ended: what it printed, and its exit code, None where it was ended at its deadline."""

    output: str
    code: int | None


def run_under_torchrun(path: Path, ranks: int, timeout: float) -> Outcome:
    """Run a script on so many ranks; it is ended after ``timeout`` seconds."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(path),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    # A group of its own, so that the ranks end with it.
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return Outcome(output.decode(errors="replace"), process.returncode)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks when it is told to; they are in sessions of their own.
        process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        return Outcome(output.decode(errors="replace"), None)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
