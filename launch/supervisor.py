"""What the process that the launcher started does on each rank: keep a worker alive, and tell of it.

A supervisor imports no torch, so nothing that a trial does can take it down with it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.folder import FOLDER, PrivateFolder, remove_left_behind
from launch.process import (
    Activity,
    activity,
    adopt_orphans,
    children,
    describe_end,
    end_children,
    kill_group,
    sleeps_on_purpose,
    worker_environment,
)
from launch.wire import Connection, ConnectionClosed, decode, encode
from launch.worker import WorkerContext

# What is kept of the beginning and of the end of a worker's output.
_KEPT_OUTPUT = 1 << 20
# How long a process is watched before it counts as idle, in seconds; CPU time is counted in hundredths.
IDLE_INTERVAL = 0.1


@dataclass(frozen=True)
class Settings:
    """How the ranks' workers are started.

    Attributes:
        entry: ``package.module:function``; called in each worker with its WorkerContext, it returns the handler of
            requests.
        preload: the modules that are imported once, before workers are forked.
        preload_later: modules, or ``module:function`` to call; prepared when the job says so (:meth:`Job.prepare`).
        seed: of the workers' hash seeds, which differ from rank to rank and are the same in every run.
        python: another interpreter for the workers; None for this one.
        fork: False for workers that are fresh interpreters each time (for libraries that cannot be forked).
        environment: added to the workers' environment.
        output_directory: where each worker's output goes, as ``rank<N>.log``; None for a private folder that is
            removed at the end.
        waiting_files: parts of file names; a worker whose innermost Python frames are in such a file waits for
            other ranks.
        passing_files: parts of names of files whose frames do not count there: what a call only passes through, such as
            dispatchers.
        grace: how many seconds the other ranks get at the most once one has failed. Those that wait for it in a
            collective are stopped at once in any case; without a limit, those that compute get their full time.
        exchange: ``package.module:function``, run in a process of its own with ``(argument, connection)`` on each rank
            that torchrun or Slurm started. It hands the first rank's ``argument["text"]`` to the others through the
            store at ``address``, ``port``, which the first rank's must hold itself unless ``served``.
    """

    entry: str
    preload: tuple[str, ...] = ()
    preload_later: tuple[str, ...] = ()
    seed: int = 0
    python: str | None = None
    fork: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    output_directory: str | None = None
    waiting_files: tuple[str, ...] = ("/torch/distributed/",)
    passing_files: tuple[str, ...] = ("/torch/_ops.py", "/torch/_compile.py", "/torch/_dynamo/")
    grace: float = math.inf
    exchange: str | None = None


class WarmFailure(RuntimeError):
    """The warm process could not be made to fork a worker; says why."""


def hash_seed(seed: int, rank: int) -> str:
    """PYTHONHASHSEED of a rank: ranks differ, runs do not.

    The numbers are arbitrary, but such that with seed 0 and four ranks a set of two words does not come out in one
    order on all ranks.
    """
    return str(((seed + 1) * 1_000_003 + rank * 7919 + 1) % 4_294_967_295)


def _python_path() -> str:
    """PYTHONPATH with the folder that holds this package, for interpreters that do not have it installed."""
    here = str(Path(__file__).resolve().parent.parent)
    given = os.environ.get("PYTHONPATH", "")
    return here if not given else f"{here}{os.pathsep}{given}"


def _open_output(directory: str | None, name: str) -> int:
    """A file for what a process prints, opened to append; in a directory it is begun anew. Without a directory it has
    no name: nobody else can open it, and it is gone with the last process that has it, however that ends."""
    flags = os.O_RDWR | os.O_APPEND
    if directory is not None:
        return os.open(Path(directory) / name, flags | os.O_CREAT | os.O_TRUNC, 0o600)
    path = tempfile.gettempdir()
    try:
        return os.open(path, flags | os.O_TMPFILE, 0o600)
    except OSError:  # a file system without nameless files
        file, name = tempfile.mkstemp(prefix="sbp-")
        os.close(file)
        opened = os.open(name, flags)
        os.unlink(name)
        return opened


class Supervisor:
    """The processes of one rank. Made before MPI is initialised, so that imports overlap with that."""

    def __init__(self, settings: Settings, rank: int, log: str | None = None) -> None:
        log = log or f"rank{rank}"
        self.settings = settings
        self.rank = rank
        self.worker: Worker | None = None
        self._ends: dict[int, int] = {}
        self._preparing = False
        self._warm: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._output = _open_output(settings.output_directory, f"{log}.log")
        self._side_output = _open_output(settings.output_directory, f"{log}.side.log")
        if rank == 0:
            remove_left_behind()
        self._folder = PrivateFolder()
        # A case may leave processes behind that are in no group of ours: they are found as orphans.
        adopt_orphans()
        self._others = children()
        if settings.fork:
            self._start_warm()

    # ------------------------------------------------------------------------------------ starting processes

    def _environment(self) -> dict[str, str]:
        extra = {
            "PYTHONHASHSEED": hash_seed(self.settings.seed, self.rank),
            "PYTHONPATH": _python_path(),
            FOLDER: self._folder.path,
            **self.settings.environment,
        }
        return worker_environment(extra)

    def _start_warm(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._warm = subprocess.Popen(
                [
                    self.settings.python or sys.executable,
                    "-m",
                    "launch.warm",
                    str(theirs.fileno()),
                    *self.settings.preload,
                    "--",
                    *self.settings.preload_later,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment(),
            )
        self._control = ours

    def start_worker(
        self, context: WorkerContext, variables: Mapping[str, str] | None = None, timeout: float = 120.0
    ) -> None:
        """Start this rank's worker of a new world; the old one must be gone. ``variables`` are added to its
        environment unless it has them already. Raises WarmFailure."""
        assert self.worker is None
        ours, theirs = socket.socketpair()
        stacks = os.memfd_create("stacks")
        output = self._output
        try:
            if self.settings.fork:
                request = {
                    "kind": "worker",
                    "entry": self.settings.entry,
                    "context": vars(context),
                    "environment": dict(variables or {}),
                }
                pid = self._fork(request, [theirs.fileno(), stacks, output], timeout)
                child = None
            else:
                child = self._fresh(context, variables or {}, [theirs.fileno(), stacks, output])
                pid = child.pid
        finally:
            theirs.close()
        self.worker = Worker(pid, Connection(ours), stacks, child)

    def _fresh(
        self, context: WorkerContext, variables: Mapping[str, str], files: list[int]
    ) -> subprocess.Popen[bytes]:
        words = [self.settings.python or sys.executable, "-m", "launch.worker", *map(str, files)]
        return subprocess.Popen(
            [*words, self.settings.entry, encode(vars(context)).hex()],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            env={**variables, **self._environment()},
        )

    def _fork(self, request: dict[str, Any], files: Sequence[int], timeout: float) -> int:
        for attempt in (1, 2):
            assert self._control is not None
            try:
                socket.send_fds(self._control, [encode(request)], list(files))
                message = self._answer(timeout)
            except OSError:
                message = None
            if message is not None:
                if "failure" in message:
                    raise WarmFailure(message["failure"])
                return int(message["pid"])
            if attempt == 1:  # the warm process died: a new one takes over
                self._stop_warm()
                self._start_warm()
                if self._preparing:
                    self.prepare()
        raise WarmFailure("the process that forks workers does not answer")

    def prepare(self) -> None:
        """Have the warm process prepare what was left for later, while nobody needs it."""
        self._preparing = True
        if self._control is not None:
            try:
                self._control.send(encode({"kind": "prepare"}))
            except OSError:
                pass  # it died; the one that takes over is told

    def _answer(self, timeout: float) -> dict[str, Any] | None:
        """The answer to a fork request; None where the warm process is gone or silent. Notes ends on the way."""
        assert self._control is not None
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            readable, _, _ = select.select([self._control], [], [], left)
            if not readable:
                return None
            data = self._control.recv(1 << 16)
            if not data:
                return None
            message: dict[str, Any] = decode(data)
            if "ended" not in message:
                return message
            self._ends[message["ended"]] = message["status"]
        return None

    def side(self, entry: str, argument: Any) -> Side:
        """Start one more process, which runs ``entry(argument, connection)``. Raises WarmFailure."""
        ours, theirs = socket.socketpair()
        stacks = os.memfd_create("stacks")
        output = self._side_output
        try:
            if self.settings.fork and self.settings.python is None:
                request = {"kind": "side", "entry": entry, "argument": argument}
                pid = self._fork(request, [theirs.fileno(), stacks, output], 120)
                child = None
            else:
                # Not in the workers' interpreter: a side process belongs to this one.
                files = [theirs.fileno(), output]
                child = subprocess.Popen(
                    [sys.executable, "-m", "launch.side", *map(str, files), entry, encode(argument).hex()],
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    env=self._environment(),
                )
                pid = child.pid
        finally:
            theirs.close()
            os.close(stacks)
        return Side(pid, Connection(ours), child)

    # ---------------------------------------------------------------------------------------------- the end

    def how_it_ended(self, worker: Worker, patience: float = 2.0) -> str:
        """In words how a worker that closed its socket ended."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if worker.child is not None:
                if worker.child.poll() is not None:
                    code = worker.child.returncode
                    return describe_end(-code if code < 0 else code << 8)
            else:
                self._drain_ends()
                if worker.pid in self._ends:
                    return describe_end(self._ends[worker.pid])  # asked for again when the worker is dropped
            time.sleep(0.005)
        return "closed its connection"

    def _drain_ends(self) -> None:
        while self._control is not None:
            readable, _, _ = select.select([self._control], [], [], 0)
            if not readable:
                return
            try:
                data = self._control.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            message = decode(data)
            if "ended" in message:
                self._ends[message["ended"]] = message["status"]

    def drop_worker(self) -> None:
        """Kill the worker and all that it started."""
        if self.worker is None:
            return
        worker, self.worker = self.worker, None
        worker.kill()
        if worker.child is None:
            # The warm process is its parent: it must have taken note before it is itself ended, or a zombie remains.
            self.how_it_ended(worker)
        self._ends.clear()
        self._trim_output()
        self._folder.empty()

    def _trim_output(self) -> None:
        """Keep the beginning and the end of what workers printed."""
        size = os.fstat(self._output).st_size
        if size <= 2 * _KEPT_OUTPUT:
            return
        tail = os.pread(self._output, _KEPT_OUTPUT, size - _KEPT_OUTPUT)
        os.ftruncate(self._output, _KEPT_OUTPUT)
        os.write(self._output, b"\n... output left out here ...\n" + tail)  # opened to append

    def _stop_warm(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._warm is not None:
            self._warm.kill()
            self._warm.wait()
            self._warm = None

    def close(self) -> None:
        """End all processes of this rank and remove its files."""
        self.drop_worker()
        self._stop_warm()
        end_children(self._others)
        for file in (self._output, self._side_output):
            os.close(file)
        self._folder.close()


class Worker:
    """One worker, as its supervisor sees it."""

    def __init__(
        self, pid: int, connection: Connection, stacks: int, child: subprocess.Popen[bytes] | None
    ) -> None:
        self.pid = pid
        self.connection = connection
        self.child = child
        self._stacks = stacks
        self._watched: tuple[float, Activity] | None = None
        self._idle_since: float | None = None

    def idle_for(self) -> float:
        """For how many seconds up to now it has slept without using any CPU time; called every now and then.

        A stopped process (SIGSTOP) is not idle, and neither is one that waits for the processor or in a timed sleep.
        """
        now = time.monotonic()
        current = activity(self.pid)
        if current is None or current.state != "S" or sleeps_on_purpose(self.pid):
            self._watched, self._idle_since = None, None
            return 0.0
        if self._watched is None or self._watched[1] != current:
            self._watched, self._idle_since = (now, current), now
        return now - (self._idle_since or now)

    def computes(self) -> bool:
        """Whether it uses the processor at this moment; looks for a twentieth of a second."""
        before = activity(self.pid)
        time.sleep(0.05)
        after = activity(self.pid)
        return before is not None and after is not None and (after.state == "R" or after != before)

    def forget_idleness(self) -> None:
        """A new request begins."""
        self._watched, self._idle_since = None, None

    def stack(self, patience: float = 0.5) -> str:
        """The Python stacks of all its threads; empty where it does not answer (stopped, or ended)."""
        start = os.lseek(self._stacks, 0, os.SEEK_END)
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            pass
        end = time.monotonic() + patience
        seen, text = -1, b""
        while time.monotonic() < end:
            size = os.fstat(self._stacks).st_size
            if size > start and size == seen:  # it has stopped growing
                break
            seen = size
            time.sleep(0.01)
        text = os.pread(self._stacks, 1 << 18, start)
        return text.decode("utf-8", "replace")

    def last_words(self) -> str:
        """What faulthandler wrote when it crashed."""
        size = os.fstat(self._stacks).st_size
        return os.pread(self._stacks, 1 << 18, max(0, size - (1 << 17))).decode("utf-8", "replace")

    def kill(self) -> None:
        kill_group(self.pid)
        if self.child is not None:
            self.child.wait()
        self.connection.close()
        os.close(self._stacks)


class Side:
    """A process beside the workers, such as the one that plans."""

    def __init__(self, pid: int, connection: Connection, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self._connection = connection
        self._child = child
        self._closed = False

    def receive(self, timeout: float) -> Any:
        """Its next message, None after ``timeout`` seconds. Raises SideError where it ended or raised."""
        try:
            message = self._connection.receive(timeout)
        except ConnectionClosed:
            raise SideError("the process ended before it had said all") from None
        if isinstance(message, dict) and set(message) == {"raised"}:
            raised = message["raised"]
            raise SideError(f"{raised['error']}: {raised['message']}\n{raised['traceback']}")
        return message

    def send(self, value: Any) -> None:
        self._connection.send(value)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        kill_group(self.pid)
        if self._child is not None:
            self._child.wait()
        self._connection.close()


class SideError(RuntimeError):
    """A side process failed; says how."""
