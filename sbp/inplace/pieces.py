"""Writes to the local piece of a distributed tensor, made behind its back.

Plain operators are seen by the watch's mode; whether they write to somebody's piece is told by the memory that they
write to. What is not known to be a piece at that time, or is written in a way that no mode sees, shows later in the
piece's version: DTensor's own operators do not count there, so any other number than the last one is a write.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sbp.inplace import tensors
from sbp.inplace.log import Log
from sbp.inplace.records import BYPASSED
from sbp.inplace.stack import Site, here

_MOST_KNOWN = 20_000
_MOST_RECENT = 4_096

_WRITTEN = "written to the local piece"


class LocalPieces:
    """Looks after local pieces.

    Attributes:
        complete: every distributed tensor made before the watch is known, with its piece's version.
    """

    def __init__(self, log: Log) -> None:
        self.complete = False
        self._log = log
        # By memory: the distributed tensors whose pieces lie there.
        self._known: dict[int, tuple[StorageWeakRef, list[weakref.ref[Any]]]] = {}
        # By the tensor's id: the version of its piece that is accounted for, where that is not 0.
        self._versions: dict[int, tuple[weakref.ref[Any], int]] = {}
        # By memory: the last plain write to what is not known to be a piece.
        self._recent: dict[int, tuple[Site, str]] = {}

    def known(self) -> Iterable[Any]:
        """The tensors that are looked after and still there."""
        found = (ref() for _, refs in list(self._known.values()) for ref in refs)
        return [tensor for tensor in found if tensor is not None]

    def know(self, tensor: Any) -> None:
        """Look after this tensor's piece from now on."""
        piece = tensors.local(tensor)
        storage = tensors.storage_of(piece)
        if not storage:
            return
        found = self._known.get(storage)
        if found is None or found[0].expired():
            if len(self._known) >= _MOST_KNOWN:
                self._known = {s: known for s, known in self._known.items() if not known[0].expired()}
            found = self._known[storage] = StorageWeakRef(tensors.storage(piece)), []
        refs = found[1]
        refs[:] = [ref for ref in refs if ref() is not None and ref() is not tensor]
        refs.append(weakref.ref(tensor))

    def accept(self, tensor: Any, version: int) -> None:
        """This version of the tensor's piece is accounted for."""
        number = id(tensor)
        versions = self._versions

        def forget(ref: weakref.ref[Any]) -> None:
            found = versions.get(number)
            if found is not None and found[0] is ref:
                del versions[number]

        versions[number] = weakref.ref(tensor, forget), version

    def check(self, tensor: Any, version: int, ending: bool = False) -> None:
        """Tell of a write to the tensor's piece that has not been accounted for. ``version`` is above 0."""
        found = self._versions.get(id(tensor))
        is_known = found is not None and found[0]() is tensor
        if found is not None and is_known and version <= found[1]:
            return
        self.accept(tensor, version)
        recent = self._recent.get(tensors.storage_of(tensors.local(tensor)))
        if recent is not None:
            self._tell(recent[0], recent[1], tensor, _WRITTEN)
        elif is_known or self.complete:
            site = Site("", 0, "", None, None) if ending else here(2)._replace(module=None, family=None)
            when = "by the end of the watch" if ending else "when it was used here"
            message = f"the local piece was written in a way that cannot be seen; noticed {when}"
            self._tell(site, "a write to the local piece", tensor, message)

    def plain_write(self, written: Iterable[torch.Tensor], operator: str, harmless: bool) -> None:
        """A plain operator is about to write to these tensors, or has done so."""
        for tensor in written:
            storage = tensors.storage_of(tensor)
            found = self._known.get(storage)
            owners = [] if found is None or found[0].expired() else [ref() for ref in found[1]]
            owners = [owner for owner in owners if owner is not None]
            if owners and not harmless:
                self._tell(here(2), operator, owners[-1], _WRITTEN)
                for owner in owners:
                    # Autograd counts the write when the mode has returned.
                    self.accept(owner, tensors.version_of(tensors.local(owner)) + 1)
            elif not owners:
                if len(self._recent) >= _MOST_RECENT:
                    self._recent = {}
                self._recent[storage] = here(2, with_module=False), operator

    def _tell(self, site: Site, operator: str, tensor: Any, message: str) -> None:
        shown = tensors.placement_text(tensor)
        self._log.plain_entry(site, operator, "local piece", shown).count(BYPASSED, (shown,), message)
