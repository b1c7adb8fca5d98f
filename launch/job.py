"""The ranks as one job: rank 0 leads, the others relay between it and their workers."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.network import LOOPBACK, Place, interfaces, loopback_interface, open_everywhere, reach
from launch.ranks import Announced, Channel, LaunchError, MpiChannel, announced, open_channel
from launch.sockets import ChannelLost
from launch.supervisor import IDLE_INTERVAL, Settings, Side, SideError, Supervisor, WarmFailure
from launch.wire import ConnectionClosed, decode, encode
from launch.worker import WorkerContext
from launch.worlds import Worlds, split

# How long a supervisor may take to answer; it never waits for a worker for longer than a stack dump takes.
_SUPERVISOR_PATIENCE = 30.0
# How long all unfinished workers must have been idle, waiting inside a collective, before that is called a
# deadlock: after a rank has failed, and otherwise.
_DEADLOCK_AFTER_FAILURE = 0.15
_DEADLOCK = 1.0
# The innermost frames of a stack that are looked at to see what a worker waits in.
_FRAMES = 4


@dataclass(frozen=True)
class RankInfo:
    """One rank of the job."""

    rank: int
    host: str
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Reply:
    """One rank's answer to a request.

    Attributes:
        status: ``ok``; ``raised`` (an exception left the handler); ``crash`` (the worker died); ``hang`` (no answer
            before the deadline, or a deadlock); ``waiting`` (it was well, but waited for a rank that had failed).
        value: what the handler returned.
        error, message, traceback: the exception of ``raised``; for the others the message says what happened.
        stack: the Python stacks of all threads, for ``crash``, ``hang`` and ``waiting``.
        seconds: from the request to the answer.
    """

    rank: int
    status: str
    value: Any = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    stack: str = ""
    seconds: float = 0.0


class JobError(RuntimeError):
    """The job's own processes failed, not a worker: nothing more can be run."""


class _Relay:
    """One rank's part: does what rank 0 says with the worker of its rank, and says what became of it. Rank 0 has
    one as well, which it calls instead of sending messages."""

    def __init__(
        self, supervisor: Supervisor, hosts: list[str], rank: int, place: Place, before: int = 0
    ) -> None:
        self.supervisor = supervisor
        self.rank = rank
        self.hosts = hosts
        self.place = place
        self.before = before  # ranks of other worlds on this host that come first
        self.number = -1  # of the request that the worker is at, -1 for none

    def fork(self, world: int) -> dict[str, Any]:
        self.supervisor.drop_worker()
        self.number = -1
        mine = self.hosts[self.rank]
        context = WorkerContext(
            self.rank,
            len(self.hosts),
            self.before + self.hosts[: self.rank].count(mine),
            self.hosts.count(mine),
            mine,
            tuple(dict.fromkeys(self.hosts)),
            world,
        )
        variables = {"LOCAL_RANK": str(context.local_rank), "LOCAL_WORLD_SIZE": str(context.local_size)}
        if self.place.interface:
            # gloo would listen on whatever the host's name resolves to.
            variables["GLOO_SOCKET_IFNAME"] = self.place.interface
        try:
            self.supervisor.start_worker(context, variables)
        except WarmFailure as error:
            return {"what": "forked", "failure": str(error)}
        return {"what": "forked", "failure": ""}

    def request(self, number: int, request: bytes) -> dict[str, Any] | None:
        """Hand a request to the worker; the answer to that where it is dead already."""
        worker = self.supervisor.worker
        self.number = number
        if worker is None:
            return self._ended("crash", "there is no worker", "")
        worker.forget_idleness()
        try:
            worker.connection.send_bytes(request)
        except ConnectionClosed:
            return self._dead()
        return None

    def poll(self) -> dict[str, Any] | None:
        """The worker's answer, or its death, where there is one by now."""
        worker = self.supervisor.worker
        if self.number < 0 or worker is None:
            return None
        try:
            data = worker.connection.receive_bytes(0)
        except ConnectionClosed:
            return self._dead()
        if data is None:
            return None
        number, self.number = self.number, -1
        return {"what": "reply", "number": number, "answer": data}

    def look(self) -> dict[str, Any]:
        """For how long the worker has been idle and, if it is, where it stands."""
        worker = self.supervisor.worker
        if self.number < 0 or worker is None:
            return {"what": "looked", "number": self.number, "idle": 0.0, "stack": ""}
        idle = worker.idle_for()
        stack = worker.stack() if idle >= _DEADLOCK_AFTER_FAILURE else ""
        worker.idle_for()  # the dump itself used a little CPU time, which must not end the idleness
        return {"what": "looked", "number": self.number, "idle": idle, "stack": stack}

    def stop(self, status: str, message: str) -> dict[str, Any]:
        """Take the worker's stacks, then kill it. Where it has answered by now, its answer counts; one that comes
        after the dump does not, since the dump's signal may have woken it from a sleep."""
        answer = self.poll()
        if answer is not None:
            return answer
        worker = self.supervisor.worker
        stack = ""
        if worker is not None:
            if status == "hang" and worker.computes():
                message += ", it was still computing"
            stack = worker.stack()
        self.supervisor.drop_worker()
        return self._ended(status, message, stack)

    def _dead(self) -> dict[str, Any]:
        worker = self.supervisor.worker
        assert worker is not None
        how = self.supervisor.how_it_ended(worker)
        stack = worker.last_words()
        self.supervisor.drop_worker()
        return self._ended("crash", how, stack)

    def _ended(self, status: str, message: str, stack: str) -> dict[str, Any]:
        number, self.number = self.number, -1
        answer = encode({"status": status, "message": message, "stack": stack})
        return {"what": "reply", "number": number, "answer": answer}

    @property
    def file(self) -> int | None:
        """What becomes readable when the worker answers."""
        worker = self.supervisor.worker
        return worker.connection.fileno() if worker is not None and self.number >= 0 else None

    def act(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Do what a message of rank 0 says; the answer, if one is due at once."""
        what = message["what"]
        if what == "fork":
            return self.fork(message["world"])
        if what == "request":
            return self.request(message["number"], message["request"])
        if what == "look":
            return self.look()
        if what == "prepare":
            self.supervisor.prepare()
            return None
        if what == "stop":
            if self.number != message["number"]:
                return None  # answered already; that answer is on its way
            return self.stop(message["status"], message["message"])
        raise JobError(f"rank 0 said {what!r}")


class _Pace:
    """Sleeps between looks at the channel: little while there is traffic, more and more without."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._quiet = 0

    def wait(self, file: int | None) -> None:
        """Wait for the worker's socket or a short while."""
        self._quiet += 1
        # About a millisecond of quick looks, then slower ones.
        pause = 0.0001 if self._quiet < 15 else min(self._longest, 0.0001 * 1.3 ** min(self._quiet - 15, 50))
        if file is None:
            time.sleep(pause)
        else:
            select.select([file], [], [], pause)

    def traffic(self) -> None:
        self._quiet = 0


class Job:
    """The job, on rank 0. Only :func:`launch.start` makes one.

    Attributes:
        size: the number of ranks.
        ranks: who they are.
        launcher: what started them, with its version.
        worlds: the other worlds, where the ranks were split into several; see :class:`launch.worlds.Worlds`.
        address: where the first rank's host is reached by all ranks; loopback where all are on one host.
        world_number: counts the worlds of workers.
        on_new_world: called after workers were forked, before the next request reaches them; makes them a world.
    """

    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor,
        channel: Channel,
        hosts: list[str],
        place: Place,
        worlds: Worlds | None = None,
        before: int = 0,
    ) -> None:
        self.settings = settings
        self.size = channel.size
        self.launcher = channel.launcher
        self.address = place.address
        self.worlds = worlds
        self.world_number = 0
        self.on_new_world: Callable[[Job], None] | None = None
        self.ranks = [
            RankInfo(rank, host, hosts[:rank].count(host), hosts.count(host))
            for rank, host in enumerate(hosts)
        ]
        self._channel = channel
        self._relay = _Relay(supervisor, hosts, 0, place, before)
        self._supervisor = supervisor
        self._number = 0
        self._world_alive = False
        self._sides: list[Side] = []
        self._closed = False

    # ----------------------------------------------------------------------------------------------- requests

    def call(
        self,
        request: Any,
        timeout: float,
        ranks: Sequence[int] | None = None,
        failed: Callable[[Any], bool] | None = None,
    ) -> list[Reply]:
        """Send ``request`` to the workers of ``ranks`` (all, without) and wait for what becomes of it.

        Never raises for a worker's fault. After a crash, hang or wait the workers are dropped, and the next call
        starts new ones.

        Args:
            request: plain data and numpy arrays.
            timeout: the deadline in seconds.
            ranks: which ranks.
            failed: whether a value that a handler returned means that its rank failed, so that nobody need wait for
                it.

        Returns: a reply for each of ``ranks``, in their order.

        Raises JobError where a supervisor does not answer.
        """
        self._ensure_world()
        return self._call(request, timeout, list(range(self.size)) if ranks is None else list(ranks), failed)

    def _ensure_world(self) -> None:
        if self._world_alive:
            return
        self.world_number += 1
        self._tell_all({"what": "fork", "world": self.world_number})
        for rank, message in self._answers("forked", range(self.size), 180).items():
            if message["failure"]:
                raise JobError(f"rank {rank}: {message['failure']}")
        self._world_alive = True
        if self.on_new_world is not None:
            self.on_new_world(self)

    def _call(
        self, request: Any, timeout: float, ranks: list[int], failed: Callable[[Any], bool] | None
    ) -> list[Reply]:
        self._number += 1
        begin = time.monotonic()
        data = encode(request)
        replies: dict[int, Reply] = {}
        troubled_since: float | None = None
        first_reply: float | None = None
        next_look = begin + 3 * IDLE_INTERVAL
        looks: dict[int, dict[str, Any]] = {}
        stopping: tuple[str, str] | None = None
        pace = _Pace(0.002)

        def take(rank: int, message: dict[str, Any] | None) -> None:
            nonlocal troubled_since, first_reply
            if message is None:
                return
            pace.traffic()
            if message["what"] == "looked":
                looks[rank] = message
            if message["what"] != "reply" or message["number"] != self._number or rank in replies:
                return
            now = time.monotonic()
            reply = Reply(rank=rank, seconds=now - begin, **decode(message["answer"]))
            replies[rank] = reply
            first_reply = first_reply or now
            bad = reply.status in ("raised", "crash") or (
                failed is not None and reply.status == "ok" and failed(reply.value)
            )
            if bad:
                troubled_since = troubled_since or now

        # The others first: rank 0's own worker needs no message to start.
        message = {"what": "request", "number": self._number, "request": data}
        for rank in sorted(ranks, reverse=True):
            take(rank, self._tell(rank, message))
        while len(replies) < len(ranks):
            take(0, self._relay.poll())
            arrived = self._channel.receive()
            if arrived is not None:
                take(arrived[0], decode(arrived[1]))
                continue
            now = time.monotonic()
            if stopping is not None:
                if now > begin + timeout + _SUPERVISOR_PATIENCE:
                    silent = [rank for rank in ranks if rank not in replies]
                    raise JobError(f"the supervisors of ranks {silent} do not answer")
            elif now - begin > timeout:
                stopping = "hang", f"no answer within {timeout:g} s"
            elif troubled_since is not None and now - troubled_since > self.settings.grace:
                stopping = "waiting", "stopped: another rank had failed"
            elif now >= next_look:
                waiting = [rank for rank in ranks if rank not in replies]
                stopping = self._deadlocked(looks, waiting, list(replies), troubled_since is not None)
                next_look = now + IDLE_INTERVAL
                # Asked once something is odd: a rank has answered, or none has for a while.
                if stopping is None and (first_reply is not None or now - begin > 2 * _DEADLOCK):
                    for rank in waiting:
                        take(rank, self._tell(rank, {"what": "look"}))
            if stopping is not None and not any(m.get("stopped") for m in looks.values()):
                looks = {-1: {"stopped": True}}
                order = {
                    "what": "stop",
                    "number": self._number,
                    "status": stopping[0],
                    "message": stopping[1],
                }
                for rank in ranks:
                    if rank not in replies:
                        take(rank, self._tell(rank, order))
            pace.wait(self._relay.file)
        if any(reply.status in ("crash", "hang", "waiting") for reply in replies.values()):
            self._world_alive = False
        return [replies[rank] for rank in ranks]

    def _deadlocked(
        self, looks: dict[int, dict[str, Any]], waiting: list[int], finished: list[int], failure: bool
    ) -> tuple[str, str] | None:
        """Whether the unfinished workers wait for ranks that will never come: all of them idle inside a collective.

        Ranks that have answered will not take part in it any more, so waiting longer changes nothing. A worker that
        computes, sleeps or was stopped is not called dead before its deadline.
        """
        due = _DEADLOCK_AFTER_FAILURE if failure else _DEADLOCK
        for rank in waiting:
            look = looks.get(rank)
            if look is None or look["number"] != self._number or look["idle"] < due:
                return None
            if not _waits_in(look["stack"], self.settings.waiting_files, self.settings.passing_files):
                return None
        if failure:
            return "waiting", "stopped: it waited for a rank that had failed"
        those = f"rank{'s' * (len(finished) > 1)} {', '.join(map(str, sorted(finished)))}"
        reason = f"{those} finished" if finished else "all ranks wait"
        return "hang", f"deadlock: waits in a collective for ever, {reason}"

    # ---------------------------------------------------------------------------------------------- messages

    def _tell(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        if rank == 0:
            return self._relay.act(message)
        self._channel.send(rank, encode(message))
        return None

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in range(1, self.size):
            self._channel.send(rank, encode(message))
        self._own = self._relay.act(message)

    def _answers(self, what: str, ranks: Sequence[int], patience: float) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        if self._own is not None:
            found[0] = self._own
        end = time.monotonic() + patience
        pace = _Pace(0.002)
        while len(found) < len(ranks):
            arrived = self._channel.receive()
            if arrived is not None:
                pace.traffic()
                message = decode(arrived[1])
                if message["what"] == what:
                    found[arrived[0]] = message
                continue
            if time.monotonic() > end:
                raise JobError(f"ranks {sorted(set(ranks) - set(found))} do not answer")
            pace.wait(None)
        return found

    # ------------------------------------------------------------------------------------------------- others

    def drop_world(self) -> None:
        """Have the next call start new workers."""
        self._world_alive = False

    def prepare(self) -> None:
        """Have every rank prepare what its settings leave for later, beside whatever else goes on."""
        self._tell_all({"what": "prepare"})

    def side(self, entry: str, argument: Any) -> Side:
        """Start one more process on rank 0: it runs ``entry(argument, connection)``."""
        try:
            side = self._supervisor.side(entry, argument)
        except WarmFailure as error:
            raise JobError(str(error)) from error
        self._sides.append(side)
        return side

    def close(self) -> None:
        """End all processes on all ranks."""
        if self._closed:
            return
        self._closed = True
        if self.worlds is not None:
            self.worlds.close()
        for side in self._sides:
            side.close()
        for rank in range(1, self.size):
            self._channel.send(rank, encode({"what": "close"}))
        self._supervisor.close()
        self._channel.finish()

    def abort(self) -> None:
        """End the job at once, on all ranks, without asking them."""
        self._supervisor.close()
        self._channel.abort()


def _waits_in(stack: str, files: Sequence[str], passing: Sequence[str] = ()) -> bool:
    """Whether the main thread's innermost frames, but for those in one of ``passing``, are in one of ``files``.

    faulthandler lists the threads, each with its innermost frame first; the main one comes last.
    """
    threads = [part for part in stack.replace("Current thread", "Thread").split("Thread ") if "File" in part]
    if not threads:
        return False
    frames = [line for line in threads[-1].splitlines() if line.lstrip().startswith("File")]
    own = [frame for frame in frames if not any(name in frame for name in passing)][:_FRAMES]
    return any(name in frame for frame in own for name in files)


def _serve(relay: _Relay, channel: Channel) -> None:
    """A rank other than 0: relay until rank 0 closes the job."""
    pace = _Pace(0.002)
    while True:
        answer = relay.poll()
        if answer is not None:
            channel.send(0, encode(answer))
            pace.traffic()
        arrived = channel.receive()
        if arrived is None:
            pace.wait(relay.file)
            continue
        pace.traffic()
        message = decode(arrived[1])
        if message["what"] == "close":
            return
        answer = relay.act(message)
        if answer is not None:
            channel.send(0, encode(answer))


def start(settings: Settings, ranks_per_world: int | None = None) -> Job | int:
    """Join the other ranks. All ranks call it together.

    Args:
        settings: how workers are started.
        ranks_per_world: split the ranks into worlds of so many, each a job of its own with a rank 0 of its own, which
            share ``job.worlds``. Needs MPI.

    Returns: on rank 0 the job; on every other rank the exit code, after rank 0 has closed the job.

    A launcher that does not fit the MPI library, or no MPI at all, is one line on stderr (of rank 0) and exit code 2
    on every rank.
    """
    found = announced() or Announced("single", 1, 0)
    # The imports of the warm process overlap with those of MPI.
    # The worlds are alike: a rank's hash seed is that of its place in its world.
    place_in_world = found.rank % ranks_per_world if ranks_per_world else found.rank
    supervisor = Supervisor(settings, place_in_world, f"rank{found.rank}")
    sides: list[Side] = []

    def exchange(argument: dict[str, Any]) -> str:
        """Has a process that may import torch talk to the launcher's store."""
        assert settings.exchange is not None
        sides.append(supervisor.side(settings.exchange, argument))
        text = sides[-1].receive(120)
        if text is None:
            raise LaunchError("the launcher's store does not answer")
        return str(text)

    try:
        channel = open_channel(exchange if settings.exchange else None)
        make_worlds, before = None, 0
        if ranks_per_world:
            if not isinstance(channel, MpiChannel):
                raise LaunchError(f"several worlds of {ranks_per_world} ranks need MPI; use mpirun")
            everywhere, mine = channel.all_hosts(), channel.rank
            # Worlds on one host share its devices: a rank's place on its host counts those of all worlds.
            before = everywhere[: mine - mine % ranks_per_world].count(everywhere[mine])
            channel, make_worlds = split(channel, ranks_per_world)
        hosts = channel.all_hosts()
        place = _meet(channel, hosts)
    except (LaunchError, SideError, WarmFailure) as error:
        supervisor.close()
        if found.rank == 0:
            print(f"launch: {error}", file=sys.stderr)
        return 2
    finally:
        for side in sides:
            side.close()
    if channel.rank == 0:
        _stop_on_signals()
        return Job(
            settings, supervisor, channel, hosts, place, make_worlds() if make_worlds else None, before
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the job in order
    try:
        _serve(_Relay(supervisor, hosts, channel.rank, place, before), channel)
    except ChannelLost as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    finally:
        supervisor.close()
    channel.finish()
    return 0


def _meet(channel: Channel, hosts: list[str]) -> Place:
    """Agree on the address at which the first rank's host is reached. Raises LaunchError where there is none."""
    if len(set(hosts)) == 1:
        return Place(LOOPBACK, loopback_interface())

    def hear() -> dict[str, Any]:
        end, pace = time.monotonic() + _SUPERVISOR_PATIENCE, _Pace(0.01)
        while (arrived := channel.receive()) is None:
            if time.monotonic() > end:
                raise LaunchError("the ranks do not agree on an address: one does not answer")
            pace.wait(None)
        message: dict[str, Any] = decode(arrived[1])
        return message

    if channel.rank > 0:
        found = reach(hear()["doors"])
        channel.send(0, encode({"reached": list(found)}))
        address = hear()["address"]
        if not address:
            raise LaunchError("no address of the first rank's host is reached from all other hosts")
        return Place(address, found[address])
    listeners = open_everywhere()
    doors = {address: listener.getsockname()[1] for address, listener in listeners.items()}
    for rank in range(1, channel.size):
        channel.send(rank, encode({"doors": doors}))
    reached = [set(hear()["reached"]) for _ in range(1, channel.size)]
    address = next((door for door in doors if all(door in some for some in reached)), "")
    for listener in listeners.values():
        listener.close()
    for rank in range(1, channel.size):
        channel.send(rank, encode({"address": address}))
    if not address:
        tried = ", ".join(doors) or "it has none but loopback"
        raise LaunchError(f"no address of {hosts[0]} ({tried}) is reached from all other hosts")
    return Place(address, interfaces()[address])


def _stop_on_signals() -> None:
    """SIGTERM ends rank 0 as Ctrl-C does: what was found is written first."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    if os.environ.get("PYTHONUNBUFFERED") is None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
