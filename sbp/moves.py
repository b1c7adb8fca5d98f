"""What a case may do with placements: move a tensor to another one, make a tensor in one, do things in any order.

Each means nothing on one device, and the same for every subject: a subject that runs recipes (see sbp.portable) finds
the calls in them as the functions ``redistribute`` and ``create``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function

from sbp.placement import Mesh, parse_sbp
from sbp.subjects.dtensor import to_torch

# Whether things that may be done in any order are done in the reverse one on this rank.
REVERSED: ContextVar[bool] = ContextVar("reversed", default=False)
# The DeviceMesh on which a subject makes new tensors; None on one device.
DEVICE_MESH: ContextVar[Any] = ContextVar("device mesh", default=None)


def redistribute(tensor: torch.Tensor, to: str) -> torch.Tensor:
    """The same values under the SBP ``to``."""
    if torch._C._is_torch_function_mode_enabled():
        moved: torch.Tensor = handle_torch_function(redistribute, (tensor,), tensor, to)
        return moved
    if isinstance(tensor, DTensor):
        mesh = Mesh(tuple(tensor.device_mesh.shape))
        return tensor.redistribute(placements=to_torch(parse_sbp(to, mesh)))
    return tensor.clone()


def create(name: str, args: tuple[Any, ...], dtype: str, to: str) -> torch.Tensor:
    """``torch.NAME(*args, dtype=dtype)`` under the SBP ``to``."""
    if torch._C._is_torch_function_mode_enabled():
        made: torch.Tensor = handle_torch_function(create, (), name, args, dtype, to)
        return made
    options = {"dtype": getattr(torch, dtype)}
    device_mesh = DEVICE_MESH.get()
    if device_mesh is None:
        return getattr(torch, name)(*args, **options)
    import torch.distributed.tensor as distributed

    placements = to_torch(parse_sbp(to, Mesh(tuple(device_mesh.shape))))
    return getattr(distributed, name)(*args, **options, device_mesh=device_mesh, placements=placements)


def in_any_order(*parts: Callable[[], Any]) -> list[Any]:
    """The results of parts that do not depend on each other."""
    numbered = list(enumerate(parts))
    done = {index: part() for index, part in (reversed(numbered) if REVERSED.get() else numbered)}
    return [done[index] for index in range(len(parts))]
