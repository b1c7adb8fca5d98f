"""Many worlds in one MPI job: each has ranks and a leader of its own, and all take their work from one counter.

``mpirun -n 64`` with 4 ranks a world makes 16 worlds. The first ranks of the worlds, their leaders, share a counter
that MPI keeps on the very first rank (one-sided: nobody has to answer), and send what they found to that rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from launch.ranks import LaunchError, MpiChannel

# Beyond any number of trials: no ticket is left.
_NO_MORE = 1 << 62
_PAUSE = 0.002
# How long the other leaders wait for what the first one finds before the run, in seconds.
_PATIENCE = 600.0


class Worlds:
    """The other worlds, as one leader sees them.

    Attributes:
        index: of this leader's world.
        count: how many worlds there are.
    """

    def __init__(self, leaders: Any, mpi: Any) -> None:
        self._mpi = mpi
        self._leaders = leaders
        self._channel = MpiChannel(leaders, mpi)
        self.index = self._channel.rank
        self.count = self._channel.size
        size = 8 if self.index == 0 else 0
        self._window = mpi.Win.Allocate(size, disp_unit=8, comm=leaders)
        if self.index == 0:
            self._update(0, mpi.REPLACE)
        self._meet()  # nobody takes a ticket before the counter is set

    def _update(self, value: int, operation: Any) -> int:
        given, before = np.array([value], np.int64), np.zeros(1, np.int64)
        self._window.Lock(0, self._mpi.LOCK_SHARED)
        self._window.Fetch_and_op([given, self._mpi.INT64_T], [before, self._mpi.INT64_T], 0, 0, operation)
        self._window.Unlock(0)
        return int(before[0])

    def next_ticket(self) -> int | None:
        """The next number that no world has taken, from 0 on; None after :meth:`stop`."""
        ticket = self._update(1, self._mpi.SUM)
        return ticket if ticket < _NO_MORE else None

    def stop(self) -> None:
        """No world gets a ticket any more."""
        self._update(_NO_MORE, self._mpi.REPLACE)

    def forward(self, data: bytes) -> None:
        """Send a result to the first world's leader. Never waits for it."""
        self._channel.send(0, data)

    def collected(self) -> list[tuple[int, bytes]]:
        """On the first world's leader: what has arrived, with the world that sent it."""
        found = []
        while (arrived := self._channel.receive()) is not None:
            found.append(arrived)
        return found

    def share(self, data: bytes | None = None) -> bytes:
        """The first world's leader's ``data``, on every leader. All leaders call it together, before anything is
        forwarded. Raises LaunchError where it does not come."""
        if self.index == 0:
            assert data is not None
            for other in range(1, self.count):
                self._channel.send(other, data)
            return data
        end = time.monotonic() + _PATIENCE
        while (arrived := self._channel.receive()) is None:
            if time.monotonic() > end:
                raise LaunchError(f"nothing was heard of the first world for {_PATIENCE:.0f} s")
            time.sleep(_PAUSE)
        return arrived[1]

    def _meet(self) -> None:
        """Wait for all leaders, asleep: MPI's own barrier would spin on a core that a worker needs."""
        request = self._leaders.Ibarrier()
        while not request.Test():
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Wait until all leaders have come here."""
        if self.index == 0:
            self.stop()
        self._channel.finish()
        self._meet()
        self._window.Free()


def split(channel: MpiChannel, ranks_per_world: int) -> tuple[MpiChannel, Callable[[], Worlds] | None]:
    """The channel of this rank's world, and on the first rank of each what makes its :class:`Worlds`.

    Raises LaunchError where the ranks do not make whole worlds.
    """
    if channel.size % ranks_per_world:
        raise LaunchError(
            f"{channel.size} ranks do not make whole worlds of {ranks_per_world}; "
            f"use mpirun -n {channel.size - channel.size % ranks_per_world or ranks_per_world}"
        )
    mpi, everybody = channel.mpi, channel.communicator
    world = everybody.Split(channel.rank // ranks_per_world, channel.rank)
    is_leader = channel.rank % ranks_per_world == 0
    leaders = everybody.Split(0 if is_leader else mpi.UNDEFINED, channel.rank)
    return MpiChannel(world, mpi), (lambda: Worlds(leaders, mpi)) if is_leader else None
