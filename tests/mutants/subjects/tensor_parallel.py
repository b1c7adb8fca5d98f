"""A column-parallel and a row-parallel linear layer, on one mesh axis and beside data parallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import Planted, copy_to_ranks, reduce, sum_over_ranks
from torch import nn

from sbp import Case, Parallel, World

__all__ = ["CASES"]

PLANTED = Planted()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class PartMLP(nn.Module):
    def __init__(self, world: World, fault: str, axis: str | int = 0) -> None:
        super().__init__()
        own = 16 // world.size_of(axis)
        self.up, self.down = nn.Linear(8, own), nn.Linear(own, 8)
        self.world, self.fault, self.axis = world, fault, axis
        kind, _, how = fault.partition("_")
        self.forwards = how if kind == "forward" else "sum"
        self.backwards = how if kind == "backward" else "sum"
        for name, parameter in self.named_parameters():
            if fault == f"scaled_{name}":
                parameter.register_hook(lambda gradient: gradient * world.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world, fault = self.world, self.fault
        if fault == "control_flow" and world.rank == 2:
            x = x * 2
        if fault == "control_flow_by_own_weights" and self.up.weight.sum() > 0:
            x = x.clamp(-0.5, 0.5)
        backward_axis = "dp" if fault == "copied_along_dp" else self.axis
        hidden = torch.tanh(self.up(copy_to_ranks(x, world, self.backwards, backward_axis)))
        part = F.linear(hidden, self.down.weight)
        if fault == "bias_on_every_rank":
            return sum_over_ranks(part + self.down.bias, world, "sum", self.axis)
        if fault == "bias_on_no_rank":
            return sum_over_ranks(part, world, "sum", self.axis) + 0 * self.down.bias
        forward_axis = "dp" if fault == "summed_along_dp" else self.axis
        return sum_over_ranks(part, world, self.forwards, forward_axis) + self.down.bias


SPLIT = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}


def mlp(fault: str) -> Case:
    return Case(
        f"mlp-{fault}",
        lambda: (MLP(), torch.randn(4, 8, requires_grad=True)),
        spmd=lambda module, world: PartMLP(world, fault),
        placements=SPLIT,
    )


WAYS = {
    "missing": "missing",
    "doubled": "doubled",
    "half": "wrong group",
    "maximum": "wrong operation",
    "mean": "wrong operation",
}
PLANTED.plant(
    mlp,
    {
        **{f"forward_{how}": (f"forward all-reduce: {kind}", "output") for how, kind in WAYS.items()},
        **{f"backward_{how}": (f"backward all-reduce: {kind}", "x.grad") for how, kind in WAYS.items()},
        **{
            f"scaled_{name}": ("gradient scaled by ranks", f"{name}.grad")
            for name in ("up.weight", "up.bias", "down.weight", "down.bias")
        },
        "bias_on_every_rank": ("bias on every rank", "output"),
        "bias_on_no_rank": ("bias on every rank", "output"),
        "control_flow": ("rank-dependent control flow", "output"),
        "control_flow_by_own_weights": ("rank-dependent control flow", "output"),
    },
)


def grid(fault: str) -> Case:
    """Tensor parallel along one axis, data parallel along the other."""

    def parallel(module: nn.Module, world: World) -> Parallel:
        def synchronise(module: nn.Module) -> None:
            for parameter in module.parameters():
                axis = "tp" if fault == "synchronised_along_tp" else "dp"
                parameter.grad = reduce(parameter.grad, "sum", world, axis)
            if fault == "synchronised_everywhere":
                dist.all_reduce(module.down.bias.grad)

        return Parallel(PartMLP(world, fault, "tp"), synchronise=synchronise)

    return Case(
        f"grid-{fault}",
        lambda: (MLP(), torch.randn(6, 8, requires_grad=True)),
        spmd=parallel,
        axes=("dp", "tp"),
        meshes=("2x2",),
        placements={
            **{name: {"tp": sbp} for name, sbp in SPLIT.items()},
            "x": {"dp": "S(0)"},
            "output": {"dp": "S(0)"},
        },
    )


PLANTED.plant(
    grid,
    {
        "summed_along_dp": ("forward all-reduce: wrong group", "output"),
        "copied_along_dp": ("backward all-reduce: wrong group", "x.grad"),
        "synchronised_along_tp": ("backward all-reduce: wrong group", "up.weight.grad"),
        "synchronised_everywhere": ("backward all-reduce: doubled", "down.bias.grad"),
    },
)

CASES = list(PLANTED.cases())
