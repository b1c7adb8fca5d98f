"""Writes in place: through a view that is a copy, and to a tensor that is a part of a sum."""

from __future__ import annotations

import torch
from planted import Planted, sum_over_ranks
from torch import nn

from sbp import Case, World

__all__ = ["CASES"]

PLANTED = Planted()


class Cache(nn.Module):
    """Keeps what it is given in one row of a table, and adds up all rows."""

    def __init__(self, columns: int, fault: str = "none") -> None:
        super().__init__()
        self.register_buffer("cache", torch.randn(6, columns))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = x.detach()
        if self.fault == "write_to_reshaped":
            # Of a transposed tensor this is a copy.
            self.cache.t().reshape(-1)[2::6].copy_(new)
        elif self.fault == "write_to_chosen_rows":
            self.cache[[2]].copy_(new.unsqueeze(0))
        elif self.fault == "write_to_contiguous":
            self.cache.t().contiguous()[:, 2].copy_(new)
        elif self.fault == "write_one_row_late":
            self.cache[3].copy_(new)
        else:
            self.cache[2].copy_(new)
        return x * 2


def cache(fault: str) -> Case:
    return Case(
        f"cache-{fault}",
        lambda: (Cache(8), torch.randn(8, requires_grad=True)),
        spmd=lambda module, world: Cache(8 // world.size, fault),
        placements={"x": "S(0)", "output": "S(0)", "cache": "S(1)"},
    )


LOST = ("a view's write lost", "cache")
PLANTED.plant(
    cache,
    {
        "write_to_reshaped": LOST,
        "write_to_chosen_rows": LOST,
        "write_to_contiguous": LOST,
        "write_one_row_late": LOST,
    },
)


class Residual(nn.Module):
    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        self.down = nn.Linear(inner, 6, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down(x) * 0.5 + residual


class PartResidual(Residual):
    def __init__(self, world: World, fault: str) -> None:
        super().__init__(8 // world.size)
        self.world, self.fault = world, fault

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        part = self.down(x)
        if self.fault == "added_to_part":
            part *= 0.5
            part += residual
            return sum_over_ranks(part, self.world)
        if self.fault == "scaled_and_summed":
            part += residual / self.world.size
            part *= 0.5
            return sum_over_ranks(part, self.world)
        if self.fault == "squashed_part":
            part.clamp_(-0.1, 0.1)
        total = sum_over_ranks(part, self.world)
        total = total * 0.5
        total += residual
        return total


def residual(fault: str) -> Case:
    return Case(
        f"residual-{fault}",
        lambda: (Residual(), torch.randn(4, 8), torch.randn(4, 6)),
        spmd=lambda module, world: PartResidual(world, fault),
        placements={"x": "S(1)", "down.weight": "S(1)"},
    )


PLANTED.plant(
    residual,
    dict.fromkeys(("added_to_part", "scaled_and_summed", "squashed_part"), ("+= on P", "output")),
)

CASES = list(PLANTED.cases())
