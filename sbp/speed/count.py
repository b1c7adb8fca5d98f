"""What one step does beside taking time: its collectives, and how much it holds in tensors at once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Not traffic of its own.
_NO_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
# torch has two families of collectives; these are the names that the two have in common.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
}


class StepCounter(TorchDispatchMode):
    """Sees every operator that runs on plain tensors, those inside of DTensor and of DDP's reducer as well.

    Attributes:
        collectives: how many, by name.
        collective_bytes: the sizes of their whole tensors, added up: the larger of what goes in and what comes out.
        peak_bytes: the most that the tensors seen held at once. What a kernel takes for itself is not seen.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.collective_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in held:
            self._note(tensor)
        self.peak_bytes = self._held()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # such as DTensor: what it does with its local tensors comes here next
        result = func(*args, **(kwargs or {}))
        values = [*args, *(kwargs or {}).values(), result]
        for tensor in _tensors(values):
            self._note(tensor)
        self.peak_bytes = max(self.peak_bytes, self._held())
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in _NAMESPACES and name not in _NO_TRAFFIC:
            self.collectives[_NAMES.get(name, name)] += 1
            self.collective_bytes += max(
                sum(tensor.numel() * tensor.element_size() for tensor in _tensors([value]))
                for value in values
            )
        return result

    def _note(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known() is not storage:
            self._storages[id(storage)] = weakref.ref(storage)

    def _held(self) -> int:
        """Bytes of all storages that are still there. Asked anew each time: FSDP changes their sizes."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def count_step(step: Callable[[], Any], held: Sequence[Tensor], device: torch.device) -> StepCounter:
    """Run a step once and look at what it does. ``held`` are the tensors that are there before it."""
    with StepCounter(held) as counter:
        step()
    if device.type == "cuda":
        # Here the allocator itself knows, kernels' workspaces included.
        own = sum(storage.nbytes() for storage in _distinct_storages(held))
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        counter.peak_bytes = own + torch.cuda.max_memory_allocated(device) - before
    return counter


def _distinct_storages(tensors: Iterable[Tensor]) -> list[Any]:
    found = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        found[storage.data_ptr()] = storage
    return list(found.values())
