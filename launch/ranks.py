"""Who this process is: its rank, the number of ranks, and the channel to the others."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

# Launcher -> the variables that hold the number of ranks and the rank. The first that is set counts.
_SIZES = {
    "mpich": ("PMI_SIZE", "PMI_RANK"),
    "openmpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


class LaunchError(RuntimeError):
    """The ranks cannot work together as they were started; one line that says what to do."""


@dataclass(frozen=True)
class Announced:
    """What the launcher's environment says, before MPI is asked."""

    launcher: str
    size: int
    rank: int


def announced() -> Announced | None:
    """What the environment says of a launcher; None outside a job."""
    for launcher, (size, rank) in _SIZES.items():
        if size in os.environ:
            try:
                return Announced(launcher, int(os.environ[size]), int(os.environ.get(rank, "0")))
            except ValueError:
                continue
    return None


def inside_job() -> bool:
    """Whether this process was started as one of several ranks."""
    return announced() is not None


def is_first_rank() -> bool:
    """Whether this is rank 0, as far as the environment tells. True outside a job."""
    found = announced()
    return found is None or found.rank == 0


class Channel(Protocol):
    """Carries messages between the ranks' supervisors."""

    rank: int
    size: int
    launcher: str

    def send(self, rank: int, data: bytes) -> None: ...

    def receive(self) -> tuple[int, bytes] | None:
        """A message that has arrived, with its sender; None without waiting where there is none."""

    def all_hosts(self) -> list[str]:
        """Each rank's host name. All ranks call it together."""

    def abort(self) -> None:
        """End all ranks at once."""


class LoneChannel:
    """The channel of a single process."""

    rank = 0
    size = 1
    launcher = "single"

    def send(self, rank: int, data: bytes) -> None:
        raise LaunchError(f"there is no rank {rank}")

    def receive(self) -> tuple[int, bytes] | None:
        return None

    def all_hosts(self) -> list[str]:
        return [socket.gethostname()]

    def abort(self) -> None:
        os._exit(1)


class MpiChannel:
    """Messages over MPI. Nothing here waits inside MPI, which would spin on a core that a worker needs."""

    _TAG = 7

    def __init__(self, communicator: Any, mpi: Any) -> None:
        self._communicator = communicator
        self._mpi = mpi
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        name, version = mpi.get_vendor()
        self.launcher = f"{name} {'.'.join(map(str, version))}"
        self._sending: list[tuple[Any, bytes]] = []

    def send(self, rank: int, data: bytes) -> None:
        # The bytes must live until MPI has sent them.
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        request = self._communicator.Isend([data, self._mpi.BYTE], dest=rank, tag=self._TAG)
        self._sending.append((request, data))

    def receive(self) -> tuple[int, bytes] | None:
        status = self._mpi.Status()
        message = self._communicator.Improbe(source=self._mpi.ANY_SOURCE, tag=self._TAG, status=status)
        if message is None:
            return None
        data = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([data, self._mpi.BYTE])
        return status.Get_source(), bytes(data)

    def all_hosts(self) -> list[str]:
        hosts: list[str] = self._communicator.allgather(socket.gethostname())
        return hosts

    def abort(self) -> None:
        self._communicator.Abort(1)

    def finish(self, patience: float = 2.0) -> None:
        """Give messages that are on their way a moment."""
        end = time.monotonic() + patience
        while self._sending and time.monotonic() < end:
            self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
            time.sleep(0.001)


def open_channel() -> Channel:
    """The channel to the other ranks: MPI where a launcher started several, else none is needed.

    Raises LaunchError where mpi4py is missing, or where the launcher and the MPI library do not belong together.
    """
    found = announced()
    if found is None:
        return LoneChannel()
    try:
        with warnings.catch_warnings():
            # It warns of a launcher that does not fit in several lines on every rank; here it is refused in one.
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except ImportError as error:
        raise LaunchError(
            f"mpirun started {found.size} ranks, but mpi4py cannot be loaded ({error}); "
            "pip install mpi4py mpich"
        ) from error
    except RuntimeError as error:  # no MPI library
        raise LaunchError(f"mpi4py finds no MPI library ({error}); pip install mpich") from error
    channel = MpiChannel(MPI.COMM_WORLD, MPI)
    if channel.size != found.size:
        raise LaunchError(
            f"mpirun started {found.size} ranks, but the MPI library ({channel.launcher}) sees {channel.size}: "
            "the launcher and the library do not belong together; use the mpirun of this environment"
        )
    _abort_on_error(channel)
    return channel


def _abort_on_error(channel: MpiChannel) -> None:
    """An exception that nobody catches ends the whole job: a rank that leaves alone would hang the rest."""
    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
            sys.stderr.flush()
        except Exception:
            traceback.print_exc()
        channel.abort()

    sys.excepthook = hook
