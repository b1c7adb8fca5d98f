"""Dropout: parts of a tensor need patterns of their own, replicas the same one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from planted import Planted
from torch import nn

from sbp import Case, World

__all__ = ["CASES"]

PLANTED = Planted()


def seeded_dropout(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Half of the elements dropped, as the seed says."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(x.shape, generator=generator) < 0.5
    return x * kept * 2


class TwoDropouts(nn.Module):
    """A residual stream that every rank has, beside features of which each rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.dropout(x), F.dropout(self.up(x))


class PartTwoDropouts(nn.Module):
    def __init__(self, world: World, fault: str) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32 // world.size)
        self.world, self.fault = world, fault

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rank, fault = self.world.rank, self.fault
        replicated = {"different_on_replicas": rank, "different_on_last": int(rank == 3)}.get(fault, 0)
        split = {"same_on_shards": 0, "same_on_pairs": rank // 2}.get(fault, rank)
        return seeded_dropout(x, 1 + replicated), seeded_dropout(self.up(x), 101 + split)


def dropout(fault: str) -> Case:
    return Case(
        f"dropout-{fault}",
        lambda: (TwoDropouts(), torch.randn(12, 8)),
        spmd=lambda module, world: PartTwoDropouts(world, fault),
        placements={"up.weight": "S(0)", "up.bias": "S(0)", "output[1]": "S(1)"},
        random=True,
        gradients=False,
    )


PLANTED.plant(
    dropout,
    {
        "same_on_shards": ("dropout: the same on all shards", "output[1]"),
        "same_on_pairs": ("dropout: the same on all shards", "output[1]"),
        "different_on_replicas": ("dropout: different on replicas", "output[0]"),
        "different_on_last": ("dropout: different on replicas", "output[0]"),
    },
)

CASES = list(PLANTED.cases())
