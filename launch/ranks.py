"""Who this process is: its rank, the number of ranks, and the channel to the others."""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
import sys
import termios
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from launch.network import LOOPBACK, distinct_names, host_identity, loopback_interface
from launch.sockets import ChannelLost, gather, join, new_token

# Launcher -> the variables that hold the number of ranks and the rank, and others that must be set too. The first that
# fits counts: mpirun may itself run within a Slurm job, and either of them may have been started by torchrun.
_SIZES = {
    "mpich": ("PMI_SIZE", "PMI_RANK"),
    "openmpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "spawned": ("SBP_LAUNCH_SIZE", "SBP_LAUNCH_RANK", "SBP_LAUNCH_PORT", "SBP_LAUNCH_TOKEN"),
    "torchrun": ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
    # Without SLURM_STEP_ID it is the script of a batch job, which is no rank.
    "slurm": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"),
}
_MPI_LAUNCHERS = ("mpich", "openmpi")
# How long the other ranks may take to come, in seconds.
_PATIENCE = 120.0


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
    for launcher, (size, rank, *others) in _SIZES.items():
        if size in os.environ and all(name in os.environ for name in others):
            try:
                found = Announced(launcher, int(os.environ[size]), int(os.environ.get(rank, "0")))
            except ValueError:
                continue
            # torchrun and srun start single processes too, which need nobody to talk to.
            if found.size > 1 or launcher in _MPI_LAUNCHERS or launcher == "spawned":
                return found
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

    def finish(self) -> None:
        """Wait a moment for messages that are on their way."""


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

    def finish(self) -> None:
        return


class MpiChannel:
    """Messages over MPI. Nothing here waits inside MPI, which would spin on a core that a worker needs."""

    _TAG = 7

    def __init__(self, communicator: Any, mpi: Any) -> None:
        self.communicator = communicator
        self.mpi = mpi
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        name, version = mpi.get_vendor()
        self.launcher = f"{name} {'.'.join(map(str, version))}"
        self._sending: list[tuple[Any, bytes]] = []

    def send(self, rank: int, data: bytes) -> None:
        # The bytes must live until MPI has sent them.
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        request = self.communicator.Isend([data, self.mpi.BYTE], dest=rank, tag=self._TAG)
        self._sending.append((request, data))

    def receive(self) -> tuple[int, bytes] | None:
        status = self.mpi.Status()
        message = self.communicator.Improbe(source=self.mpi.ANY_SOURCE, tag=self._TAG, status=status)
        if message is None:
            return None
        data = bytearray(status.Get_count(self.mpi.BYTE))
        message.Recv([data, self.mpi.BYTE])
        return status.Get_source(), bytes(data)

    def all_hosts(self) -> list[str]:
        return distinct_names(self.communicator.allgather(host_identity()))

    def abort(self) -> None:
        self.mpi.COMM_WORLD.Abort(1)

    def finish(self, patience: float = 2.0) -> None:
        """Give messages that are on their way a moment."""
        end = time.monotonic() + patience
        while self._sending and time.monotonic() < end:
            self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
            time.sleep(0.001)


Exchange = Callable[[dict[str, Any]], str]


def open_channel(exchange: Exchange | None = None) -> Channel:
    """The channel to the other ranks: MPI where mpirun started them, sockets where something else did; alone, none
    is needed.

    Args:
        exchange: tells the first rank's text to all others through the store whose address the launcher gave.

    Raises LaunchError where mpi4py is missing, where the launcher and the MPI library do not belong together, or
    where ranks do not find each other.
    """
    found = announced()
    if found is None:
        return LoneChannel()
    channel = _open_mpi(found) if found.launcher in _MPI_LAUNCHERS else _open_sockets(found, exchange)
    _abort_on_error(channel)
    return channel


def _open_sockets(found: Announced, exchange: Exchange | None) -> Channel:
    rank, size, name = found.rank, found.size, found.launcher
    try:
        if name == "spawned":
            port, token = int(os.environ["SBP_LAUNCH_PORT"]), os.environ["SBP_LAUNCH_TOKEN"]
            if rank == 0:
                listener = socket.socket(fileno=int(os.environ["SBP_LAUNCH_LISTENER"]))
                return gather(listener, size, token, "spawned", _PATIENCE)
            return join(LOOPBACK, port, rank, size, token, "spawned", _PATIENCE)
        if exchange is None:
            raise LaunchError(f"{name} started {size} ranks, but this program only works under mpirun")
        master = slurm_master() if name == "slurm" else torch_master()
        if rank > 0:
            address, number, token = exchange({**vars(master), "rank": rank, "size": size}).split()
            return join(address, int(number), rank, size, token, name, _PATIENCE)
        # The address that the launcher gave everybody is one that all reach.
        address = LOOPBACK if master.one_host else socket.gethostbyname(master.address)
        token = new_token()
        with socket.create_server((address, 0), backlog=size) as listener:
            text = f"{address} {listener.getsockname()[1]} {token}"
            exchange({**vars(master), "rank": 0, "size": size, "text": text})
            return gather(listener, size, token, name, _PATIENCE)
    except (ChannelLost, OSError, KeyError, ValueError) as error:
        raise LaunchError(f"{name} started {size} ranks, but they do not find each other: {error}") from error


@dataclass(frozen=True)
class Master:
    """Where the launcher has the ranks meet.

    Attributes:
        address, port: of a store.
        one_host: whether all ranks are on one host.
        served: whether the launcher itself runs the store.
    """

    address: str
    port: int
    one_host: bool
    served: bool


def torch_master() -> Master:
    """The store of torchrun, or of anything else that sets the same variables."""
    variables = os.environ
    return Master(
        variables["MASTER_ADDR"],
        int(variables["MASTER_PORT"]),
        variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"],
        variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def slurm_master() -> Master:
    """A store on the first host of a Slurm step, on a port that follows from the job's and the step's number."""
    variables = os.environ
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
    one_host = variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES", "1")) == "1"
    number = int(variables.get("SLURM_JOB_ID", "0")) * 17 + int(variables["SLURM_STEP_ID"])
    return Master(LOOPBACK if one_host else first_host(nodes), 20_000 + number % 12_000, one_host, False)


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: ``gpu[03-05,9],cpu1`` -> ``gpu03``."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


# Launcher -> the variable that holds the number of ranks on this host.
_LOCAL_SIZES = {"mpich": "MPI_LOCALNRANKS", "openmpi": "OMPI_COMM_WORLD_LOCAL_SIZE"}
# Tell MPI's transports (UCX, and libfabric's two over TCP) which interface to listen on.
_MPI_INTERFACE = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")


def keep_mpi_on_loopback(found: Announced) -> None:
    """Where the launcher has put all ranks on one host, MPI is to listen where no other host reaches it. What the
    user has set stays."""
    interface = loopback_interface()
    if interface and os.environ.get(_LOCAL_SIZES[found.launcher]) == str(found.size):
        for name in _MPI_INTERFACE:
            os.environ.setdefault(name, interface)
        # Open MPI's own transport over TCP listens on all addresses, whatever interface it is given.
        os.environ.setdefault("OMPI_MCA_btl", "^tcp")


def _open_mpi(found: Announced) -> MpiChannel:
    keep_mpi_on_loopback(found)
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
    return channel


def _abort_on_error(channel: Channel) -> None:
    """An exception that nobody catches ends the whole job: a rank that leaves alone would hang the rest."""
    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
            sys.stderr.flush()
            _wait_until_read(sys.stderr.fileno(), 2.0)
        except Exception:
            traceback.print_exc()
        channel.abort()

    sys.excepthook = hook


def _wait_until_read(pipe: int, seconds: float) -> None:
    """Wait until the other end took what was written: a launcher that is told to abort drops what is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        unread = array.array("i", [0])
        try:
            fcntl.ioctl(pipe, termios.FIONREAD, unread)
        except OSError:  # not a pipe
            return
        if unread[0] == 0:
            break
        time.sleep(0.001)
    # What the launcher's helper took has yet to reach the launcher.
    time.sleep(0.1)
