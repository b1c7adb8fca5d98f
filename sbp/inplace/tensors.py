"""What the watch must know about a distributed tensor: the one place that says "DTensor".

Everything that holds for another kind of distributed tensor as well is written against these functions: whether a
tensor is one, what it claims about itself, its local piece, and how it is brought into another placement.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from sbp.subjects.dtensor import from_torch, is_refusal

__all__ = ["DISTRIBUTED", "is_distributed", "is_refusal"]

DISTRIBUTED: type[torch.Tensor] = DTensor


def is_distributed(value: object) -> bool:
    """Whether the value is a distributed tensor."""
    return isinstance(value, DISTRIBUTED)


# These three are called for every tensor of every operator, and this is the fastest way to get an attribute.
claim: Callable[[Any], Any] = attrgetter("_spec")
"""What the tensor says of itself: mesh, placements, global shape. The same object as long as nothing changed."""
placements: Callable[[Any], tuple[Any, ...]] = attrgetter("_spec.placements")
"""Its placements, one for each mesh axis; only to be compared with others."""
local: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
"""This rank's piece."""


def placement_text(tensor: Any) -> str:
    """Its placements as people write them: ``S(0)``, ``(S(0), B)``."""
    return from_torch(tensor._spec.placements)


def storage_of(piece: torch.Tensor) -> int:
    """A number that two tensors share exactly while they lie in the same memory; 0 where that cannot be told."""
    try:
        return int(storage(piece)._cdata)
    except (RuntimeError, NotImplementedError):
        return 0  # sparse and opaque tensors


def storage(piece: torch.Tensor) -> Any:
    """The memory that the piece lies in."""
    return (piece.elem if type(piece) is AsyncCollectiveTensor else piece).untyped_storage()


def uses(memory: Any) -> int:
    """How many tensors (and others) hold this memory; only to be compared with what it is for one tensor."""
    return int(torch._C._storage_Use_Count(memory._cdata))


def version_of(piece: torch.Tensor) -> int:
    """How often the piece was written by its user. DTensor's own operators leave this number alone, because they
    run below autograd; -1 where no number is kept (inference mode)."""
    try:
        return piece._version
    except RuntimeError:
        return -1


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The distributed tensor that this one is a view of, None where it is none or nobody knows."""
    base = tensor._base
    return base if base is not None and is_distributed(base) else None


def pieces(tensor: Any) -> list[torch.Tensor]:
    """The pieces of all ranks that live in this process: one, or all of a simulated world (LocalTensor)."""
    piece = tensor._local_tensor if is_distributed(tensor) else tensor
    if isinstance(piece, AsyncCollectiveTensor):
        piece = piece.trigger_wait()
    simulated = getattr(piece, "_local_tensors", None)
    return [piece] if simulated is None else list(simulated.values())


def is_simulated(tensor: Any) -> bool:
    """Whether all ranks of the tensor's world are in this process."""
    return hasattr(tensor._local_tensor, "_local_tensors")


def has_partial(tensor: Any) -> bool:
    """Whether its pieces must be added up (or averaged, ...) to give its value."""
    return any(placement.is_partial() for placement in tensor._spec.placements)


def mesh_of(tensor: Any) -> Any:
    """The mesh that it lies on; only to be compared with others."""
    return tensor._spec.mesh


def mesh_ranks(tensor: Any) -> tuple[int, ...]:
    """The global ranks of its mesh, in order."""
    return tuple(int(rank) for rank in tensor._spec.mesh.mesh.flatten().tolist())


def replicated(tensor: Any) -> Any:
    """A copy that every rank has whole. All ranks of the mesh must call it together."""
    return tensor.redistribute(placements=[Replicate()] * tensor._spec.mesh.ndim)


def placed_like(tensor: Any, other: Any) -> Any:
    """A copy of ``tensor`` under the placements of ``other``, which must have no partial ones. All ranks of the
    mesh must call it together."""
    return tensor.redistribute(placements=list(other._spec.placements))


def can_compare(tensor: Any) -> bool:
    """Whether this rank holds real values of the tensor, which may be looked at now."""
    if tensor._spec.mesh.get_coordinate() is None:
        return False
    if dist.get_backend() == "fake" and not is_simulated(tensor):
        return False
    held = pieces(tensor)
    if any(type(piece) not in (torch.Tensor, torch.nn.Parameter) or piece.is_meta for piece in held):
        return False
    return not (held[0].is_cuda and torch.cuda.is_current_stream_capturing())


def store() -> Any:
    """What all ranks of the job can write to and read from without a collective; None outside a job.

    Raises ValueError where a group exists that has none.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def alive() -> list[Any]:
    """Every distributed tensor of this process."""
    return [thing for thing in gc.get_objects() if type(thing) is DISTRIBUTED]


def members(things: Iterable[Any]) -> Iterator[Any]:
    """The distributed tensors among tensors and modules' parameters and buffers."""
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            yield from members([*thing.parameters(), *thing.buffers()])
        elif is_distributed(thing):
            yield thing


class Taps:
    """Tells of what no dispatch mode sees: a tensor made, its local piece taken, its ``data`` replaced.

    They are put on the class for as long as a watch is open, so that everything else costs nothing.

    Args:
        made: called with each new distributed tensor whose piece has been written before, and that piece's version.
        taken: called with the tensor whose ``to_local`` is called.
        set_data: called with the tensor, the new data, and what makes the assignment.
    """

    def __init__(
        self,
        made: Callable[[Any, int], None],
        taken: Callable[[Any], None],
        set_data: Callable[[Any, Any, Callable[[], None]], None],
    ) -> None:
        self._made, self._taken, self._set_data = made, taken, set_data
        self._put_back: list[Callable[[], None]] = []

    def open(self) -> None:
        original_init, original_to_local = DTensor.__init__, DTensor.to_local
        earlier = DTensor.__dict__.get("data")  # another watch's
        data = earlier if earlier is not None else torch.Tensor.data
        made, taken, set_data = self._made, self._taken, self._set_data

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original_init(self, *args, **kwargs)
            version = version_of(self._local_tensor)
            if version > 0:
                made(self, version)

        def to_local(self: Any, *args: Any, **kwargs: Any) -> Any:
            taken(self)
            return original_to_local(self, *args, **kwargs)

        def get(self: Any) -> Any:
            return data.__get__(self)

        def put(self: Any, value: Any) -> None:
            set_data(self, value, lambda: data.__set__(self, value))

        DTensor.__init__ = __init__
        DTensor.to_local = to_local
        DTensor.data = property(get, put)

        def put_back() -> None:
            DTensor.__init__ = original_init
            DTensor.to_local = original_to_local
            if earlier is None:
                del DTensor.data
            else:
                DTensor.data = earlier

        self._put_back.append(put_back)

    def close(self) -> None:
        while self._put_back:
            self._put_back.pop()()
