"""Correct per-rank code under many sizes: nothing in it may be called wrong, in any precision.

Each family is a function from a random generator to a case; what it draws are sizes that divide the ranks and sizes
that do not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sbp import Case, Parallel, Train, World, call

__all__ = ["CASES"]

SEEDS = 120


class Sum(torch.autograd.Function):
    """All-reduce, forward or backward or both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, axis: Any, forward: bool, backward: bool) -> Any:
        ctx.group = world.group(axis) if backward else None
        return added(x, world.group(axis)) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.group is not None:
            gradient = added(gradient, ctx.group)
        return gradient, None, None, None, None


def added(x: torch.Tensor, group: Any) -> torch.Tensor:
    total = x.detach().contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def total_of(x: torch.Tensor, world: World, axis: Any = 0) -> torch.Tensor:
    """The ranks' sum, which all ranks use alike."""
    return Sum.apply(x, world, axis, True, False)


def shared_total(x: torch.Tensor, world: World, axis: Any = 0) -> torch.Tensor:
    """The ranks' sum, which each rank uses for its own part."""
    return Sum.apply(x, world, axis, True, True)


def copied(x: torch.Tensor, world: World, axis: Any = 0) -> torch.Tensor:
    return Sum.apply(x, world, axis, False, True)


def synchronise(module: nn.Module, group: Any = None) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = added(parameter.grad, group)


def rows_and_columns(name: str, draw: random.Random) -> Case:
    """An MLP cut along its hidden features."""
    rows, inner, hidden, outer = (
        draw.randint(1, 9),
        draw.randint(1, 40),
        4 * draw.randint(1, 64),
        draw.randint(1, 9),
    )
    activation = draw.choice([torch.tanh, F.gelu, torch.sigmoid, F.silu])

    class Whole(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(inner, hidden), nn.Linear(hidden, outer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(activation(self.up(x)))

    class Part(Whole):
        def __init__(self, world: World) -> None:
            super().__init__(hidden // world.size)
            self.world = world

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            part = F.linear(activation(self.up(copied(x, self.world))), self.down.weight)
            return total_of(part, self.world) + self.down.bias

    train = Train(steps=2, optimizer=draw.choice(["SGD:momentum", "AdamW"])) if draw.random() < 0.4 else None
    return Case(
        name,
        lambda: (Whole(hidden), torch.randn(rows, inner, requires_grad=True)),
        spmd=lambda module, world: Part(world),
        placements={"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
        train=train,
    )


def long_row(name: str, draw: random.Random) -> Case:
    """A product over a long, split dimension."""
    rows, inner, outer = draw.randint(1, 5), draw.randint(100, 1200), draw.randint(1, 7)

    def part(module: nn.Module, world: World) -> Callable[..., Any]:
        return lambda x, w: total_of(x @ w, world)

    return Case(
        name,
        lambda: (matmul, drawn(rows, inner), drawn(inner, outer)),
        spmd=part,
        placements={"x": "S(1)", "w": "S(0)"},
    )


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def on_a_grid(name: str, draw: random.Random) -> Case:
    """Rows along one mesh axis, columns along the other; each axis's gradients add up."""
    rows, inner, outer = draw.randint(2, 20), draw.randint(1, 60), draw.randint(2, 20)

    def part(module: nn.Module, world: World) -> Callable[..., Any]:
        return lambda x, w: copied(x, world, "b") @ copied(w, world, "a")

    return Case(
        name,
        lambda: (matmul, drawn(rows, inner), drawn(inner, outer)),
        spmd=part,
        axes=("a", "b"),
        meshes=("2x2",),
        placements={"x": {"a": "S(0)"}, "w": {"b": "S(1)"}, "output": {"a": "S(0)", "b": "S(1)"}},
    )


def data_parallel(name: str, draw: random.Random) -> Case:
    """Uneven parts of the batch; the loss is a share of the whole batch's mean."""
    batch, inner, classes = draw.randint(5, 40), draw.randint(1, 30), draw.randint(2, 9)

    def part(module: nn.Module, world: World) -> Parallel:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output, target, reduction="sum") / batch

        return Parallel(nn.Linear(inner, classes), loss=loss, synchronise=synchronise)

    return Case(
        name,
        lambda: call(nn.Linear(inner, classes), drawn(batch, inner)).against(
            torch.randint(classes, (batch,))
        ),
        spmd=part,
        placements={"input": "S(0)", "output": "S(0)", "target": "S(0)", "loss": "P"},
        loss=F.cross_entropy,
        train=Train(steps=2) if draw.random() < 0.3 else None,
    )


def wide(x: torch.Tensor) -> torch.Tensor:
    """What norms and losses add up is kept in float32 at least, as on one device."""
    return x if x.dtype == torch.float64 else x.float()


def layer_norm(name: str, draw: random.Random) -> Case:
    """Statistics over split features, in two passes."""
    rows, features = draw.randint(1, 9), draw.randint(5, 300)

    class Part(nn.Module):
        def __init__(self, module: nn.LayerNorm, world: World) -> None:
            super().__init__()
            begin = min(features, -(-features // world.size) * world.rank)
            own = min(features, -(-features // world.size) * (world.rank + 1)) - begin
            self.weight, self.bias = nn.Parameter(torch.empty(own)), nn.Parameter(torch.empty(own))
            self.world, self.eps = world, module.eps

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            x = wide(input)
            x = x - shared_total(x.sum(-1, keepdim=True), self.world) / features
            var = shared_total(x.square().sum(-1, keepdim=True), self.world) / features
            return (x * (var + self.eps).rsqrt() * self.weight + self.bias).to(input.dtype)

    return Case(
        name,
        lambda: (nn.LayerNorm(features), drawn(rows, features)),
        spmd=Part,
        placements={"input": "S(1)", "output": "S(1)", "weight": "S(0)", "bias": "S(0)"},
    )


def softmax(name: str, draw: random.Random) -> Case:
    """Over a split dimension, with the largest element of all ranks."""
    rows, classes = draw.randint(1, 9), draw.randint(5, 200)
    logarithm = draw.random() < 0.5

    def whole(x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(x, -1) if logarithm else F.softmax(x, -1)

    def part(module: nn.Module, world: World) -> Callable[..., Any]:
        def compute(x: torch.Tensor) -> torch.Tensor:
            x, kind = wide(x), x.dtype
            largest = x.detach().amax(-1) if x.shape[-1] else torch.full(x.shape[:-1], -1e9, dtype=x.dtype)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            x = x - largest.unsqueeze(-1)
            total = shared_total(x.exp().sum(-1, keepdim=True), world)
            return (x - total.log() if logarithm else x.exp() / total).to(kind)

        return compute

    return Case(
        name, lambda: (whole, drawn(rows, classes)), spmd=part, placements={"x": "S(1)", "output": "S(1)"}
    )


def statistics(name: str, draw: random.Random) -> Case:
    """Mean and variance over a split dimension."""
    rows, columns = draw.randint(5, 300), draw.randint(1, 5)
    unbiased = draw.random() < 0.5

    def whole(x: torch.Tensor) -> Any:
        return x.mean(0), x.var(0, unbiased=unbiased)

    def part(module: nn.Module, world: World) -> Callable[..., Any]:
        def compute(x: torch.Tensor) -> Any:
            kind, x = x.dtype, wide(x)
            total = Sum.apply(x.sum(0), world, 0, True, False)
            mean = total / rows
            centred = x - shared_total(x.sum(0), world) / rows
            var = total_of(centred.square().sum(0), world) / (rows - unbiased)
            return mean.to(kind), var.to(kind)

        return compute

    return Case(name, lambda: (whole, drawn(rows, columns)), spmd=part, placements={"x": "S(0)"})


def running_sum(name: str, draw: random.Random) -> Case:
    """cumsum along a split dimension: each rank adds what came before."""
    rows, columns = draw.randint(5, 60), draw.randint(1, 5)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, 0)

    class Before(torch.autograd.Function):
        """The sum of what lower ranks have; backward, that of what higher ranks are given."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
            ctx.world = world
            parts = [torch.empty_like(x) for _ in range(world.size)]
            dist.all_gather(parts, x.contiguous())
            return torch.stack(parts)[: world.rank].sum(0)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            parts = [torch.empty_like(gradient) for _ in range(ctx.world.size)]
            dist.all_gather(parts, gradient.contiguous())
            return torch.stack(parts)[ctx.world.rank + 1 :].sum(0), None

    def part(module: nn.Module, world: World) -> Callable[..., Any]:
        def compute(x: torch.Tensor) -> torch.Tensor:
            kind, x = x.dtype, wide(x)
            return (torch.cumsum(x, 0) + Before.apply(x.sum(0), world)).to(kind)

        return compute

    return Case(
        name, lambda: (whole, drawn(rows, columns)), spmd=part, placements={"x": "S(0)", "output": "S(0)"}
    )


def heads(name: str, draw: random.Random) -> Case:
    """Attention with some of the heads on each rank."""
    count, width = 4 * draw.randint(1, 2), draw.choice([2, 4, 8])
    dim, length = count * width, draw.randint(1, 9)
    causal = draw.random() < 0.5

    class Whole(nn.Module):
        def __init__(self, own: int) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(dim, own, bias=False) for _ in range(3))
            self.out = nn.Linear(own, dim, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (-1, width)).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return self.out(mixed.transpose(1, 2).flatten(2))

    class Part(Whole):
        def __init__(self, world: World) -> None:
            super().__init__(dim // world.size)
            self.world = world

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return total_of(super().forward(copied(x, self.world)), self.world)

    return Case(
        name,
        lambda: (Whole(dim), drawn(2, length, dim)),
        spmd=lambda module, world: Part(world),
        placements={"q.weight": "S(0)", "k.weight": "S(0)", "v.weight": "S(0)", "out.weight": "S(1)"},
    )


def convolution(name: str, draw: random.Random) -> Case:
    """Some images on each rank."""
    batch, channels, size = draw.randint(5, 9), draw.randint(1, 4), draw.randint(3, 7)

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU())

    return Case(
        name,
        lambda: (model(), drawn(batch, channels, size, size)),
        spmd=lambda module, world: Parallel(model(), synchronise=synchronise),
        placements={"input": "S(0)", "output": "S(0)"},
    )


def lookup(name: str, draw: random.Random) -> Case:
    """An embedding cut by rows, unevenly."""
    vocabulary, dim, tokens = draw.randint(5, 60), draw.randint(1, 8), draw.randint(1, 40)
    width = -(-vocabulary // 4)

    class Part(nn.Module):
        def __init__(self, world: World) -> None:
            super().__init__()
            self.first = min(vocabulary, width * world.rank)
            self.own = min(vocabulary, self.first + width) - self.first
            self.weight = nn.Parameter(torch.empty(self.own, dim))
            self.world = world

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            here = (tokens >= self.first) & (tokens < self.first + self.own)
            table = torch.cat([self.weight, self.weight.new_zeros(1, dim)])
            return total_of(F.embedding(torch.where(here, tokens - self.first, self.own), table), self.world)

    return Case(
        name,
        lambda: (nn.Embedding(vocabulary, dim), torch.randint(vocabulary, (tokens,))),
        spmd=lambda module, world: Part(world),
        placements={"weight": "S(0)"},
    )


FAMILIES = (
    rows_and_columns,
    long_row,
    on_a_grid,
    data_parallel,
    layer_norm,
    softmax,
    statistics,
    running_sum,
    heads,
    convolution,
    lookup,
)
CASES = [
    family(f"{family.__name__}-{seed}", random.Random(f"{family.__name__} {seed}"))
    for seed in range(SEEDS)
    for family in FAMILIES
]
