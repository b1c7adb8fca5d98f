"""bfloat16: what is added up in it one by one loses what float32 would have kept."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import Planted, sum_over_ranks
from torch import nn

from sbp import Case, World

__all__ = ["CASES"]

PLANTED = Planted()


def in_turn(parts: torch.Tensor) -> torch.Tensor:
    """The sum along the first dimension, rounded after each addition."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


LONG = 2048


def row(fault: str) -> Case:
    """A row-parallel product; the ranks' sums travel in bfloat16 in either case, as honest code has them."""

    def part(module: nn.Module, world: World) -> nn.Module:
        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.empty(3, LONG // world.size))

            def forward(self, input: torch.Tensor) -> torch.Tensor:
                if fault == "accumulated":
                    products = input.unsqueeze(1) * self.weight
                    return sum_over_ranks(in_turn(products.movedim(-1, 0)), world)
                return sum_over_ranks(F.linear(input, self.weight), world)

        return Part()

    return Case(
        f"long_row-{fault}",
        lambda: (nn.Linear(LONG, 3, bias=False), torch.rand(4, LONG)),
        spmd=part,
        placements={"input": "S(1)", "weight": "S(1)"},
    )


def mean_square(fault: str) -> Case:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return (x.float().square().mean(-1) + 1e-6).rsqrt().to(x.dtype)

    def part(module: nn.Module, world: World) -> object:
        def compute(x: torch.Tensor) -> torch.Tensor:
            if fault == "squares":
                total = in_turn(x.square().movedim(-1, 0)).float()
            else:
                total = x.float().square().sum(-1)
            return (sum_over_ranks(total, world) / LONG + 1e-6).rsqrt().to(x.dtype)

        return compute

    return Case(
        f"mean_square-{fault}",
        lambda: (whole, torch.randn(4, LONG, requires_grad=True)),
        spmd=part,
        placements={"x": "S(1)"},
    )


def log_sum(fault: str) -> Case:
    def part(module: nn.Module, world: World) -> object:
        def compute(x: torch.Tensor) -> torch.Tensor:
            largest = x.detach().float().amax(-1)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            shifted = x.float() - largest.unsqueeze(-1)
            powers = shifted.exp()
            if fault == "powers":
                total = in_turn(powers.to(x.dtype).movedim(-1, 0)).float()
            else:
                total = powers.sum(-1)
            return (largest + sum_over_ranks(total, world).log()).to(x.dtype)

        return compute

    return Case(
        f"log_sum-{fault}",
        lambda: (lambda x: torch.logsumexp(x, -1), torch.randn(4, LONG, requires_grad=True) * 0.1),
        spmd=part,
        placements={"x": "S(1)"},
        gradients=False,
    )


LOST = "float32 accumulation lost"
# A change of the inputs in their last place moves these sums, which cancel, nearly as far (1.4 times less).
PLANTED.plant(row, {"accumulated": (LOST, "output")}, "bfloat16", explained=True)
PLANTED.plant(mean_square, {"squares": (LOST, "output")}, "bfloat16")
PLANTED.plant(log_sum, {"powers": (LOST, "output")}, "bfloat16")

CASES = list(PLANTED.cases())
