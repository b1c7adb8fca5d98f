"""MPI inside the workers: they become one MPI world as soon as code under test imports ``mpi4py.MPI``.

Workers are not the processes that mpirun started (those must survive whatever a trial does), so MPI knows nothing of
them. Here they get a process manager of their own.
"""

from __future__ import annotations

import importlib.abc
import os
import socket
import subprocess
import sys
from typing import Any

from sbp.cases import CaseError

_KEY = "sbp/mpi"


class _Arrival(importlib.abc.MetaPathFinder):
    """Notices the import of ``mpi4py.MPI``, which initialises MPI, and makes the world ready just before."""

    def __init__(self, rank: int, size: int, store: Any, host: str) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.host = host

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "mpi4py.MPI" and "PMI_FD" not in os.environ:
            sys.meta_path.remove(self)
            connect(self.rank, self.size, self.store, self.host)


def expect_mpi(rank: int, size: int, store: Any, host: str) -> None:
    """From now on ``import mpi4py.MPI``, on all ranks together, finds one MPI world of the ranks.

    Args:
        store: the ranks' torch.distributed store, over which they find the process manager.
        host: where the first rank listens.
    """
    if not any(isinstance(finder, _Arrival) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Arrival(rank, size, store, host))


def connect(rank: int, size: int, store: Any, host: str) -> None:
    """Start the process manager (on the first rank) and have MPI find it in this process's environment."""
    if rank == 0:
        with socket.create_server((host, 0)) as listener:
            words = [str(listener.fileno()), str(size), str(os.getpid())]
            # In a session of its own: where this worker is killed, it still tidies up, and ends by itself.
            subprocess.Popen(
                [sys.executable, "-m", "sbp.subjects.pmi", *words],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            store.set(_KEY, str(listener.getsockname()[1]))
    client = socket.create_connection((host, int(store.get(_KEY))))
    client.set_inheritable(True)
    os.environ.update(PMI_FD=str(client.detach()), PMI_RANK=str(rank), PMI_SIZE=str(size))


def make_communicator(rank: int, size: int) -> Any:
    """``MPI.COMM_WORLD`` of the workers. Raises CaseError where the MPI library cannot make them one world."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CaseError(f"comm() needs mpi4py with MPICH ({error}); pip install mpi4py mpich") from error
    world = MPI.COMM_WORLD
    if world.Get_size() != size or world.Get_rank() != rank:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        raise CaseError(
            f"comm() needs MPICH, which can join the ranks' workers; {library.strip()} cannot; pip install mpich"
        )
    return world
