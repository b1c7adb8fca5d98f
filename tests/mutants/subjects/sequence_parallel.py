"""Replicated layers that each see a part of the sequence: their gradients have to be added up."""

from __future__ import annotations

import torch
import torch.distributed as dist
from planted import Planted
from torch import nn

from sbp import Case, Parallel, World

__all__ = ["CASES"]

PLANTED = Planted()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.router(self.norm(x)), -1)


def sequence(fault: str) -> Case:
    def parallel(module: nn.Module, world: World) -> Parallel:
        def synchronise(module: nn.Module) -> None:
            for name, parameter in module.named_parameters():
                if fault == f"not_reduced_{name}":
                    continue
                dist.all_reduce(parameter.grad)
                if fault == f"averaged_{name}":
                    parameter.grad /= world.size

        return Parallel(Routed(), synchronise=synchronise)

    return Case(
        f"sequence-{fault}",
        lambda: (Routed(), torch.randn(8, 8, requires_grad=True)),
        spmd=parallel,
        placements={"x": "S(0)", "output": "S(0)"},
    )


PLANTED.plant(
    sequence,
    {
        f"{how}_{name}": (f"sequence parallel: {name.partition('.')[0]} not reduced", f"{name}.grad")
        for how in ("not_reduced", "averaged")
        for name in ("norm.weight", "norm.bias", "router.weight", "router.bias")
    },
)

CASES = list(PLANTED.cases())
