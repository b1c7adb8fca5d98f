"""Small facts about processes on Linux: their state, their end, what they inherit."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
# What a launcher tells its ranks; a worker that saw these would believe to be a rank of the launcher itself.
_LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX_", "PMI2_", "MPI_", "MPIEXEC_", "MPICH_", "HYDRA_", "HYDI_", "OMPI_", "PRTE_", "OPAL_"),
    *("SLURM_", "SBP_LAUNCH_", "TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_", "LOCAL_RANK"),
    "LOCAL_WORLD_SIZE",
)
_LAUNCHER_NAMES = ("GFORTRAN_UNBUFFERED_PRECONNECTED", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        os._exit(1)


def adopt_orphans() -> None:
    """From now on, processes below this one whose parent ends become children of this one, also those that left their
    process group or session."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The ids of this process's children, those that ended and were not waited for included."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found.update(map(int, file.read().split()))
        except OSError:
            continue
    return found


def end_children(kept: set[int], patience: float = 2.0) -> None:
    """Kill the children that are not among ``kept``, and what they leave behind, until none is left."""
    deadline = time.monotonic() + patience
    while (others := children() - kept) and time.monotonic() < deadline:
        for pid in others:
            kill_group(pid)
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        time.sleep(0.001)


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: this one without what the launcher added, with one OpenMP thread and with
    torch.distributed's checks on unless these are set already."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    return {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", **kept, **extra}


@dataclass(frozen=True)
class Activity:
    """What a process does at this moment: the kernel's letter for its state (``S`` sleeping, ``R`` running, ``T``
    stopped ...) and the CPU time that all its threads used so far, in clock ticks."""

    state: str
    ticks: int


def activity(pid: int) -> Activity | None:
    """The activity of a process, None where it is gone. The state is ``R`` when any of its threads runs."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
        states = []
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii", errors="replace") as file:
                states.append(file.read().rpartition(")")[2].split()[0])
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    state = "R" if "R" in states else fields[0]
    return Activity(state, int(fields[11]) + int(fields[12]))


# nanosleep and clock_nanosleep, by machine.
_SLEEP_CALLS = {"x86_64": ("35", "230"), "aarch64": ("101", "115")}.get(platform.machine(), ())


def sleeps_on_purpose(pid: int) -> bool:
    """Whether the main thread is in a timed sleep, which ends by itself, rather than waiting for something."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            return file.read().split()[0] in _SLEEP_CALLS
    except (OSError, IndexError):
        return False


def describe_end(status: int) -> str:
    """A wait status in words: ``killed by SIGSEGV``, ``exit code 1``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def kill_group(pid: int) -> None:
    """Kill a worker with all that it started. A worker leads a process group of its own."""
    for target in (os.killpg, os.kill):
        try:
            target(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
