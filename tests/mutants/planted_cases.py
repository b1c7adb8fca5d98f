"""Correct per-rank code, and the same code with one named fault turned on.

``MUTANTS`` says of each fault what it is about and the quantity that has to be named first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sbp import Case, Parallel, Train, World, fused

__all__ = ["CASES"]


@dataclass(frozen=True)
class Mutant:
    category: str
    quantity: str
    right: Case
    planted: Case


MUTANTS: list[Mutant] = []
RIGHT: dict[str, Case] = {}


def plant(make: Callable[[str], Case], faults: dict[str, tuple[str, str]]) -> None:
    """``faults``: the flag -> what it is about, and the quantity of its place."""
    right = make("none")
    RIGHT[right.name] = right
    for fault, (category, quantity) in faults.items():
        MUTANTS.append(Mutant(category, quantity, right, make(fault)))


def reduce(x: torch.Tensor, how: str, world: World) -> torch.Tensor:
    """The sum over the ranks, or what ``how`` makes of it."""
    total = x.detach().contiguous().clone()
    if how == "missing":
        return total
    if how == "half":
        dist.all_reduce(total)
        pieces = [torch.empty_like(total) for _ in range(world.size)]
        dist.all_gather(pieces, x.detach().contiguous())
        first = world.rank // 2 * 2
        return pieces[first] + pieces[first + 1]
    dist.all_reduce(total, op=dist.ReduceOp.MAX if how == "maximum" else dist.ReduceOp.SUM)
    if how == "doubled":
        dist.all_reduce(total)
    return total / world.size if how == "mean" else total


class Reduce(torch.autograd.Function):
    """All-reduce forward and backward, each as its word says; ``no`` passes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: str, backward: str, world: World) -> torch.Tensor:
        ctx.how, ctx.world = backward, world
        return x.view_as(x) if forward == "no" else reduce(x, forward, world)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient if ctx.how == "no" else reduce(gradient, ctx.how, ctx.world), None, None, None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class PartMLP(nn.Module):
    def __init__(self, world: World, fault: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16 // world.size), nn.Linear(16 // world.size, 8)
        self.world, self.fault = world, fault
        kind, _, how = fault.partition("_")
        self.forwards = how if kind == "forward" else "sum"
        self.backwards = how if kind == "backward" else "sum"
        for name, parameter in self.named_parameters():
            if fault == f"scaled_{name}":
                parameter.register_hook(lambda gradient: gradient * world.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "control_flow" and self.world.rank == 2:
            x = x * 2
        hidden = torch.tanh(self.up(Reduce.apply(x, "no", self.backwards, self.world)))
        part = F.linear(hidden, self.down.weight)
        if self.fault == "bias_on_every_rank":
            return Reduce.apply(part + self.down.bias, "sum", "no", self.world)
        return Reduce.apply(part, self.forwards, "no", self.world) + self.down.bias


SPLIT = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}


def mlp(fault: str) -> Case:
    return Case(
        f"mlp-{fault}",
        lambda: (MLP(), torch.randn(4, 8, requires_grad=True)),
        spmd=lambda module, world: PartMLP(world, fault),
        placements=SPLIT,
    )


WAYS = ("missing", "doubled", "half", "maximum", "mean")
plant(
    mlp,
    {
        **{f"forward_{how}": (f"forward all-reduce: {how}", "output") for how in WAYS},
        **{f"backward_{how}": (f"backward all-reduce: {how}", "x.grad") for how in WAYS},
        **{
            f"scaled_{name}": ("gradient scaled by ranks", f"{name}.grad")
            for name in ("up.weight", "up.bias", "down.weight", "down.bias")
        },
        "bias_on_every_rank": ("bias added on every rank", "output"),
        "control_flow": ("rank-dependent control flow", "output"),
    },
)


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


NAMES = ("norm.weight", "norm.bias", "router.weight", "router.bias")
plant(
    sequence,
    {
        f"{how}_{name}": (f"sequence parallel: gradient {how}", f"{name}.grad")
        for how in ("not_reduced", "averaged")
        for name in NAMES
    },
)


class PartEmbedding(nn.Module):
    def __init__(self, world: World, fault: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.world, self.fault = world, fault

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rank = self.world.rank
        first = 3 * (self.world.size - 1 - rank if self.fault == "rank_order" else rank)
        low, high = first + (self.fault == "mask_low"), first + 3 - (self.fault == "mask_high")
        elsewhere = (tokens < low) | (tokens >= high)
        own = (tokens - first).clamp(0, 2)
        found = F.embedding(own, self.weight)
        if self.fault != "no_mask":
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return Reduce.apply(found, "sum", "no", self.world)


def embedding(fault: str) -> Case:
    return Case(
        f"embedding-{fault}",
        lambda: (nn.Embedding(12, 4), torch.arange(12).reshape(3, 4)),
        spmd=lambda module, world: PartEmbedding(world, fault),
        placements={"weight": "S(0)"},
    )


plant(
    embedding,
    {
        "rank_order": ("wrong rank order", "output"),
        "mask_low": ("embedding mask off by one", "output"),
        "mask_high": ("embedding mask off by one", "output"),
        "no_mask": ("embedding mask missing", "output"),
    },
)


class QKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x), self.v(x)


class FusedQKV(nn.Module):
    def __init__(self, world: World, order: tuple[int, ...]) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24 // world.size, bias=False)
        self.world, self.order = world, order

    def forward(self, x: torch.Tensor) -> Any:
        parts = self.qkv(Reduce.apply(x, "no", "sum", self.world)).chunk(3, -1)
        return tuple(parts[index] for index in self.order)


ORDERS = {"none": (0, 1, 2), "swapped_kv": (0, 2, 1), "swapped_qk": (1, 0, 2), "rotated": (1, 2, 0)}


def qkv(fault: str) -> Case:
    return Case(
        f"qkv-{fault}",
        lambda: (QKV(), torch.randn(3, 8, requires_grad=True)),
        spmd=lambda module, world: FusedQKV(world, ORDERS[fault]),
        placements={**{f"{name}.weight": "S(0)" for name in "qkv"}, "output": "S(1)"},
        parameters={"qkv.weight": fused("q.weight", "k.weight", "v.weight")},
    )


plant(
    qkv,
    {
        "swapped_kv": ("swapped q/k/v", "output[1]"),
        "swapped_qk": ("swapped q/k/v", "output[0]"),
        "rotated": ("swapped q/k/v", "output[0]"),
    },
)


def schedule(fault: str) -> Case:
    def make(delay: int) -> Callable[[Any], Any]:
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 ** max(step - delay, 0)
        )

    return Case(
        f"schedule-{fault}",
        lambda: (MLP(), torch.randn(4, 8)),
        spmd=lambda module, world: Parallel(PartMLP(world, "none"), schedule=make(int(fault == "late"))),
        placements=SPLIT,
        train=Train(steps=2, schedule=make(0)),
    )


plant(schedule, {"late": ("scheduler one step late", "learning rate 0 after step 1")})

CASES = [*RIGHT.values(), *(mutant.planted for mutant in MUTANTS)]
