"""A world of four ranks simulated in this process, and distributed tensors in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from sbp.fake_world import fake_world

RANKS = 4


@pytest.fixture
def world() -> Iterator[LocalTensorMode]:
    with fake_world(RANKS), LocalTensorMode(RANKS) as mode:
        yield mode


@pytest.fixture
def mesh(world: LocalTensorMode) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (RANKS,))


@pytest.fixture
def place(world: LocalTensorMode, mesh: Any) -> Callable[..., DTensor]:
    """Makes a distributed tensor with values of its own under the given placement; a leaf, if so wished."""

    def make(
        placement: Placement, shape: tuple[int, ...] = (8, 4), seed: int = 0, requires_grad: bool = False
    ) -> DTensor:
        with world.disable():
            full = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
            if placement.is_shard():
                pieces = full.chunk(RANKS, placement.dim)
            elif placement.is_partial():
                drawn = torch.randn(RANKS - 1, *shape, generator=torch.Generator().manual_seed(seed + 1))
                pieces = (*drawn, full - drawn.sum(0))
            else:
                pieces = (full,) * RANKS
        return from_pieces(world, mesh, placement, pieces, shape).requires_grad_(requires_grad)

    return make


def from_pieces(
    world: LocalTensorMode, mesh: Any, placement: Placement, pieces: Any, shape: tuple[int, ...]
) -> DTensor:
    local = world.rank_map(lambda rank: pieces[rank].clone())
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )


@pytest.fixture
def indices(world: LocalTensorMode, mesh: Any) -> Callable[..., DTensor]:
    """Makes a distributed tensor of the given integers under a placement."""

    def make(full: torch.Tensor, placement: Placement) -> DTensor:
        pieces = full.chunk(RANKS, placement.dim) if placement.is_shard() else (full,) * RANKS
        return from_pieces(world, mesh, placement, pieces, tuple(full.shape))

    return make
