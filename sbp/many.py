"""One run on many worlds of ranks: ``mpirun -n 64 python -m sbp.run --ranks-per-world 4`` has sixteen.

The first rank of each world leads it. All leaders plan the same trials in the same order, and number them in portions;
a portion belongs to the world that draws its number from the one counter that they share. The first world's leader
alone prints and writes; the others send it what they found. So no leader waits for another one before the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from launch import JobError, SideError
from launch.wire import decode, encode
from sbp.session import Session, Timing, Verdict, WorldError, planned_trials
from sbp.trial import Trial

# Trials of one case share what was built for it; more in a portion, and the worlds would end at different times.
PORTION = 8
_PAUSE = 0.005
# Beyond a trial's own deadline, twice (it is tried again): how long another world may say nothing, in seconds.
_PATIENCE = 300.0


class Worlds(Protocol):
    """The part of launch.worlds.Worlds that a run uses."""

    index: int
    count: int

    def next_ticket(self) -> int | None: ...

    def stop(self) -> None: ...

    def forward(self, data: bytes) -> None: ...

    def collected(self) -> list[tuple[int, bytes]]: ...

    def share(self, data: bytes | None = None) -> bytes: ...


class Tickets:
    """Which trials are this world's. With one world, all."""

    def __init__(self, worlds: Worlds | None) -> None:
        self._worlds = worlds
        self._portion = -1
        self._in_portion = 0
        self._case: object = None
        self._ticket: int | None = -1

    @property
    def over(self) -> bool:
        """Whether no world gets a trial any more."""
        return self._ticket is None

    def mine(self, trial: Trial) -> bool:
        """Whether this world runs ``trial``. To be asked for every trial, in the order of the plan."""
        if self._worlds is None:
            return True
        case = (trial.suite, trial.case, trial.dtype)
        if case != self._case or self._in_portion == PORTION:
            self._case, self._in_portion = case, 0
            self._portion += 1
        self._in_portion += 1
        while self._ticket is not None and self._ticket < self._portion:
            self._ticket = self._worlds.next_ticket()
        return self._ticket == self._portion


@dataclass(frozen=True)
class Closing:
    """What a world says at its end.

    Attributes:
        taken: how many trials it began.
        worlds: how many times its ranks made a world.
        stopped: why it did not go on to the end; empty where it did.
        timing: where its time went; see :class:`sbp.session.Timing`.
    """

    taken: int
    worlds: int
    stopped: str
    timing: dict[str, float]


def follow(
    job: Any, session: Session, request: dict[str, Any], done: Collection[str], budget: float | None
) -> None:
    """Lead one of the other worlds: run the trials that it draws, and send the first world's leader what it found.

    Args:
        job: the ranks of this world, with ``job.worlds``.
        session: runs a trial on them.
        request: what is planned; the same on all leaders.
        done: ids that are not to be run, of a run that is resumed.
        budget: after how many seconds no trial is begun.
    """
    worlds: Worlds = job.worlds
    begin = time.monotonic()
    side = job.side("sbp.planner:serve", request)
    tickets = Tickets(worlds)
    taken, stopped = 0, ""
    try:
        for item in planned_trials(side, 600):
            if not isinstance(item, Trial) or tickets.over:
                break
            if item.id in done or not tickets.mine(item):
                continue
            if budget is not None and time.monotonic() - begin > budget:
                break
            taken += 1
            verdict = session.run(item)
            found = {"verdict": verdict.to_dict(""), "writes": [dict(write) for write in verdict.writes]}
            worlds.forward(encode(found))
            if taken == 1:
                job.prepare()
    except KeyboardInterrupt:
        stopped = "interrupted"
    except (WorldError, JobError, SideError) as error:
        stopped = f"world {worlds.index + 1} of {worlds.count}: {error}"
    finally:
        side.close()
    worlds.forward(
        encode({"closing": asdict(Closing(taken, session.worlds, stopped, asdict(session.timing)))})
    )


class Others:
    """The other worlds, for the first one's leader. With one world there are none.

    Args:
        worlds: of the job.
        silence: for how long all of them may say nothing while they have work, in seconds, beyond what a trial may
            take.
    """

    def __init__(self, worlds: Worlds | None, timeout: float, silence: float = _PATIENCE) -> None:
        self._worlds = worlds
        self._patience = 2 * timeout + silence
        self._open = set(range(1, worlds.count)) if worlds is not None else set()
        self.closings: list[Closing] = []

    @property
    def count(self) -> int:
        """How many worlds there are, with the first one."""
        return 1 if self._worlds is None else self._worlds.count

    def stop(self) -> None:
        """Let no world begin another portion."""
        if self._worlds is not None:
            self._worlds.stop()

    def arrived(self) -> Iterator[Verdict]:
        """The verdicts that the other worlds have sent by now."""
        for world, data in self._worlds.collected() if self._worlds is not None else []:
            message = decode(data)
            if "closing" in message:
                self.closings.append(Closing(**message["closing"]))
                self._open.discard(world)
            else:
                yield Verdict.from_dict(message["verdict"], message["writes"])

    def remaining(self) -> Iterator[Verdict]:
        """The verdicts that are still to come, until all worlds have closed. Raises WorldError where they fall
        silent."""
        heard = time.monotonic()
        while self._open:
            nothing = True
            before = len(self._open)
            for verdict in self.arrived():
                nothing = False
                yield verdict
            if not nothing or len(self._open) < before:
                heard = time.monotonic()
            elif time.monotonic() - heard > self._patience:
                silent = ", ".join(str(world + 1) for world in sorted(self._open))
                raise WorldError(f"nothing was heard of world {silent} for {self._patience:.0f} s")
            else:
                time.sleep(_PAUSE)

    def add_to(self, timing: Timing) -> None:
        """Add where the other worlds' time went."""
        for closing in self.closings:
            for name, seconds in closing.timing.items():
                setattr(timing, name, getattr(timing, name) + seconds)


def share_start(
    worlds: Worlds | None, start: Callable[[], dict[str, Any] | None] | None
) -> dict[str, Any] | None:
    """What the first world's leader found before the run, on all leaders; None where it cannot be done.

    Args:
        worlds: of the job; with one world, ``start`` is simply called.
        start: on the first leader; what it returns is sent, and where it raises the others are told, so that
            they end as well. None on the others.
    """
    if worlds is None:
        return start() if start is not None else None
    if start is None:
        message = decode(worlds.share())
        return None if message is None else dict(message)
    found: dict[str, Any] | None = None
    try:
        found = start()
    finally:
        worlds.share(encode(found))
    return found
