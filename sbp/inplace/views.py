"""Views that are copies.

A view of a split dimension is made by bringing the tensor into another placement first: what comes out lies in memory
of its own. A write to it does not reach the tensor that it is a view of, and a write to that tensor is not seen by it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sbp.inplace import tensors
from sbp.inplace.log import Entry, Tally
from sbp.inplace.records import LOST
from sbp.inplace.stack import Site, here, relative

_MOST_COPIES = 1_024


class Copy(NamedTuple):
    """A view in memory of its own: that memory, the tensor that it is a view of, and where it was made."""

    storage: StorageWeakRef
    base: weakref.ref[torch.Tensor]
    base_storage: int
    base_size: int
    place: str


class Copies:
    """Remembers views that are copies, by their memory and by that of their base."""

    def __init__(self) -> None:
        self.copies: dict[int, Copy] = {}
        self._of: dict[int, set[int]] = {}
        # Copies whose base was written since, and what was counted for that write.
        self.stale: dict[int, tuple[Entry, Tally]] = {}

    def note(self, base: Any, result: Any) -> None:
        """A view operator took ``base`` and gave ``result``, a tensor or several."""
        if type(base) is not tensors.DISTRIBUTED:
            return
        base_storage = tensors.storage_of(tensors.local(base))
        for view in result if isinstance(result, (list, tuple)) else (result,):
            if type(view) is tensors.DISTRIBUTED:
                storage = tensors.storage_of(tensors.local(view))
                if storage != base_storage and storage and base_storage:
                    self._remember(base, base_storage, view, storage)

    def _remember(self, base: Any, base_storage: int, view: Any, storage: int) -> None:
        if len(self.copies) >= _MOST_COPIES:
            self._forget()
        memory = StorageWeakRef(tensors.storage(tensors.local(view)))
        self.copies[storage] = Copy(memory, weakref.ref(base), base_storage, base.numel(), place(here(2)))
        self._of.setdefault(base_storage, set()).add(storage)
        self.stale.pop(storage, None)  # another copy lay there before

    def _forget(self) -> None:
        """Forget the copies that are gone; and the older half if that is not enough."""
        alive = {storage: copy for storage, copy in self.copies.items() if not copy.storage.expired()}
        if len(alive) >= _MOST_COPIES:
            alive = dict(list(alive.items())[_MOST_COPIES // 2 :])
        self.copies = alive
        self.stale = {storage: tally for storage, tally in self.stale.items() if storage in alive}
        self._of = {}
        for storage, copy in alive.items():
            self._of.setdefault(copy.base_storage, set()).add(storage)

    def why_lost(self, tensor: Any) -> str:
        """Why a write to this tensor does not reach the tensor that it is a view of. Empty where it does, and where
        that tensor is out of everybody's reach."""
        base = tensors.base_of(tensor)
        storage = tensors.storage_of(tensors.local(tensor))
        copy = self._alive(storage)
        if base is None:
            base = copy.base() if copy is not None else None
            if base is None:
                return ""
        else:
            memory = tensors.storage(tensors.local(base))
            reachable = (
                sys.getrefcount(base) > _BY_VIEW_ALONE
                or tensors.uses(memory) > _BY_ONE_TENSOR
                or self._others(base, storage)
            )
            if not reachable or memory._cdata == storage:
                return ""
        made = f" (made at {copy.place})" if copy is not None else ""
        return (
            f"the view{made} is a copy: its base, {tensors.placement_text(base)}, was brought into another "
            "placement to make it, and keeps its old values"
        )

    def _alive(self, storage: int) -> Copy | None:
        copy = self.copies.get(storage)
        return None if copy is None or copy.storage.expired() else copy

    def _others(self, base: Any, storage: int) -> bool:
        """Whether other views of the base that are copies are alive, and would show the old values."""
        others = self._of.get(tensors.storage_of(tensors.local(base)), set()) - {storage}
        return any(self._alive(one) is not None for one in others)

    def mark_stale(self, entry: Entry, tally: Tally, written: Sequence[Any]) -> None:
        """Tensors were written as a whole: views of them that are copies hold old values from now on."""
        for tensor in written:
            for storage in self._of.get(tensors.storage_of(tensors.local(tensor)), ()):
                copy = self._alive(storage)
                if copy is not None and tensor.numel() == copy.base_size:
                    self.stale[storage] = entry, tally

    def check_stale(self, tensor: Any) -> None:
        """A tensor is used: if its base was written since it was made, that write was lost for it."""
        storage = tensors.storage_of(tensors.local(tensor))
        found = self.stale.pop(storage, None)
        copy = self._alive(storage)
        if found is None or copy is None:
            return
        entry, tally = found
        used = place(here(2))
        message = (
            f"a view made at {copy.place} is a copy that does not see the write, and it is used at {used}"
        )
        entry.tally[tally] -= 1
        entry.count(LOST, tally.after, message)


def place(site: Site) -> str:
    """A site as ``model.py:42``."""
    return f"{relative(site.file)}:{site.line}"


def _count_references_by_view_alone() -> int:
    """What ``sys.getrefcount`` says of a base that one local variable names, and otherwise only its view holds."""
    with torch.inference_mode(False):
        view = torch.zeros(2)[:1]
    base = view._base
    return sys.getrefcount(base)


def _count_uses_by_one_tensor() -> int:
    """What ``tensors.uses`` says of memory in which one tensor lies."""
    tensor = torch.zeros(2)
    memory = tensors.storage(tensor)
    return tensors.uses(memory)


# Taken on import: below autograd, where operators are seen, a new tensor would not know that it is a view.
_BY_VIEW_ALONE = _count_references_by_view_alone()
_BY_ONE_TENSOR = _count_uses_by_one_tensor()
