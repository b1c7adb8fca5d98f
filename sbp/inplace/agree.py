"""How ranks agree to do something together that they might not all have come to.

Running an operator a second time can communicate where the first time did not, and then every rank of the mesh must
take part, in the same order. Nothing that one rank knows proves that the others have come to the same write: a
program may write on one rank only. So the ranks meet first, through the job's key-value store and without any
collective. Whoever comes last says "go"; whoever has waited long enough says "no". Only the first of the two words
is kept, atomically, and all ranks do what it says, also those that come later.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sbp.inplace import tensors

_GO, _NO = b"go", b"no"
# Once ranks did not come, the next absence is found out sooner.
_AFTER_ABSENCE = 1.0
# Ranks that have met are in step; this only keeps a rank from waiting for one that has died.
_IN_STEP = 60.0

_times: Counter[str] = Counter()


class Meeting:
    """Ranks that have agreed. With one rank (or all ranks in this process) there is nothing to agree on."""

    def __init__(self, store: Any = None, key: str = "", size: int = 1) -> None:
        self._store, self._key, self._size = store, key, size
        self._told = 0

    def tell(self, word: int) -> set[int]:
        """Tell all ranks a small number, and hear the set of all that were told.

        Raises RuntimeError where a rank does not answer.
        """
        if self._store is None:
            return {word}
        self._told += 1
        key = f"{self._key}/{self._told}"
        # One bit range of a counter for each word: 16 bits hold more ranks than a job has.
        self._store.add(f"{key}/words", 1 << (16 * word))
        if self._store.add(f"{key}/count", 1) == self._size:
            self._store.set(f"{key}/all", "1")
        self._store.wait([f"{key}/all"], timedelta(seconds=_IN_STEP))
        total = self._store.add(f"{key}/words", 0)
        return {index for index in range(4) if (total >> (16 * index)) & 0xFFFF}


class Agreement:
    """Arranges meetings.

    Args:
        patience: how many seconds a rank waits for the others before it says no.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.refused = 0

    def meet(self, what: str, ranks: Sequence[int], alone: bool) -> Meeting | None:
        """Wait for the other ranks to come to the same thing. None where they do not.

        Args:
            what: names the thing, alike on all ranks.
            ranks: the global ranks that must come.
            alone: nobody else need come: there is one rank, or all are in this process.
        """
        if alone or len(ranks) == 1:
            return Meeting()
        store = tensors.store()
        if store is None:
            return Meeting()
        name = hashlib.sha256(f"{what}\n{tuple(ranks)}".encode()).hexdigest()[:24]
        _times[name] += 1
        key = f"sbp-watch/{name}/{_times[name]}"
        if store.add(f"{key}/here", 1) == len(ranks):
            said = store.compare_set(f"{key}/word", "", _GO.decode())
        else:
            said = self._wait(store, f"{key}/word")
        if said != _GO:
            self.refused += 1
            return None
        return Meeting(store, key, len(ranks))

    def _wait(self, store: Any, key: str) -> bytes:
        patience = min(self.patience, _AFTER_ABSENCE) if self.refused else self.patience
        try:
            store.wait([key], timedelta(seconds=patience))
            said: bytes = store.get(key)
        except RuntimeError:  # nobody said anything in time
            said = store.compare_set(key, "", _NO.decode())
        return said
