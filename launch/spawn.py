"""Start ranks from a single process: through mpirun where there is one, else as its own children."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.network import LOOPBACK
from launch.recipes import open_mpi_variables
from launch.sockets import new_token

# How long the other ranks may take to end once one has failed or the first is done, in seconds.
_GRACE = 10.0


def find_mpirun() -> str | None:
    """The mpirun of this environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _has_mpi4py() -> bool:
    from importlib.util import find_spec

    return find_spec("mpi4py") is not None


def spawn(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``python ARGUMENTS`` on so many ranks and wait; its exit code.

    Through mpirun where it and mpi4py are there, else as children of this process that talk over sockets.
    """
    mpirun = find_mpirun()
    if mpirun is None or not _has_mpi4py():
        return spawn_here(ranks, arguments)
    environment = {**os.environ, **open_mpi_variables()}
    process = subprocess.Popen([mpirun, "-n", str(ranks), sys.executable, *arguments], env=environment)
    with _handing_on(process):
        return _wait(process)


def spawn_here(ranks: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run ``python ARGUMENTS`` on so many ranks without MPI, all on this host; the first rank's exit code, or that of
    one that failed. Where one fails the others are ended."""
    token = new_token()
    command = [sys.executable, *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    with socket.create_server((LOOPBACK, 0), backlog=max(ranks, 1)) as listener:
        common = {
            **(os.environ if environment is None else environment),
            "SBP_LAUNCH_SIZE": str(ranks),
            "SBP_LAUNCH_PORT": str(listener.getsockname()[1]),
            "SBP_LAUNCH_TOKEN": token,
            "SBP_LAUNCH_LISTENER": str(listener.fileno()),
        }
        for rank in range(ranks):
            own = {**common, "SBP_LAUNCH_RANK": str(rank)}
            files = [listener.fileno()] if rank == 0 else []
            # As under mpirun, only the first rank has a standard input.
            stdin = None if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=own, pass_fds=files, stdin=stdin))
    with _handing_on(processes[0]):
        return _wait_for_all(processes)


def _wait_for_all(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, with an end to the patience once the first is done or one has failed."""
    end: float | None = None
    while any(process.poll() is None for process in processes):
        ended = [process.returncode for process in processes if process.returncode is not None]
        if end is None and (processes[0].returncode is not None or any(ended)):
            end = time.monotonic() + _GRACE
        if end is not None and time.monotonic() > end:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        try:
            time.sleep(0.02)
        except KeyboardInterrupt:
            continue  # the terminal sent it to the ranks as well; the first writes what it has
    codes = [process.returncode for process in processes]
    worst = codes[0] or next((code for code in codes if code), 0)
    return worst if worst >= 0 else 128 - worst


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal sent it to mpirun as well; its ranks write what they have


@contextmanager
def _handing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hand SIGTERM on to ``process``."""

    def hand_on(number: int, frame: object) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
