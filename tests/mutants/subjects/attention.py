"""Attention: some of the heads on each rank, or a part of the sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import Planted, copy_to_ranks, sum_gradients, sum_over_ranks
from torch import nn

from sbp import Case, Parallel, World, fused

__all__ = ["CASES"]

PLANTED = Planted()


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
        parts = self.qkv(copy_to_ranks(x, self.world)).chunk(3, -1)
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


PLANTED.plant(
    qkv,
    {
        "swapped_kv": ("swapped q/k/v", "output[1]"),
        "swapped_qk": ("swapped q/k/v", "output[0]"),
        "rotated": ("swapped q/k/v", "output[0]"),
    },
)


class Attention(nn.Module):
    """Causal attention of heads of size 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def split_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 4)).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


class GatherSequence(torch.autograd.Function):
    """All parts along dim 2 on every rank; backward, each is given the sum of its part's gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, fault: str) -> torch.Tensor:
        ctx.world, ctx.fault = world, fault
        parts = [torch.empty_like(x) for _ in range(world.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts[::-1] if fault == "gathered_backwards" else parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        if ctx.fault != "not_reduced_back":
            dist.all_reduce(total)
        rank = ctx.world.rank
        if ctx.fault == "next_part_back":
            rank = (rank + 1) % ctx.world.size
        return total.chunk(ctx.world.size, 2)[rank].contiguous(), None, None


class SequenceAttention(Attention):
    """Each rank has a part of the sequence: its own queries look at everybody's keys and values."""

    def __init__(self, world: World, fault: str) -> None:
        super().__init__()
        self.world, self.fault = world, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world, fault = self.world, self.fault
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, -1))
        k, v = GatherSequence.apply(k, world, fault), GatherSequence.apply(v, world, fault)
        length = x.shape[1]
        here = torch.arange(length) + (0 if fault == "own_positions" else length * world.rank)
        everywhere = torch.arange(length * world.size)
        mask = here.unsqueeze(1) >= everywhere
        if fault == "mask_off_by_one":
            mask = here.unsqueeze(1) + 1 >= everywhere
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


def sequence(fault: str) -> Case:
    return Case(
        f"sequence_attention-{fault}",
        lambda: (Attention(), torch.randn(2, 12, 16, requires_grad=True)),
        spmd=lambda module, world: Parallel(SequenceAttention(world, fault), synchronise=sum_gradients),
        placements={"x": "S(1)", "output": "S(1)"},
    )


PLANTED.plant(
    sequence,
    {
        "gathered_backwards": ("wrong rank order", "output"),
        "next_part_back": ("wrong rank order", "x.grad"),
        "not_reduced_back": ("backward all-reduce: missing", "x.grad"),
        "own_positions": ("wrong rank order", "output"),
        "mask_off_by_one": ("attention mask", "output"),
    },
)


class GroupedAttention(nn.Module):
    """Eight heads of queries, two heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(layer(x)) for layer in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(4, 1) for part in (k, v))
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v)))


class PartGroupedAttention(nn.Module):
    """Two heads of queries on each rank; keys and values are on all of them."""

    def __init__(self, world: World, fault: str) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out = nn.Linear(8, 16)
        self.world, self.fault = world, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world, fault = self.world, self.fault
        x = copy_to_ranks(x, world)
        q, k, v = (split_heads(layer(x)) for layer in (self.q, self.k, self.v))
        head = world.rank % 2 if fault == "wrong_group_of_heads" else world.rank // 2
        k, v = (part[:, head : head + 1].expand(-1, 2, -1, -1) for part in (k, v))
        scale = 8**-0.5 if fault == "scale_of_own_width" else None
        mixed = join_heads(F.scaled_dot_product_attention(q, k, v, scale=scale))
        return sum_over_ranks(F.linear(mixed, self.out.weight), world) + self.out.bias


def grouped(fault: str) -> Case:
    def synchronise(module: nn.Module) -> None:
        for name in ("k.weight", "k.bias", "v.weight", "v.bias"):
            if fault != "keys_not_synchronised" or not name.startswith("k"):
                dist.all_reduce(module.get_parameter(name).grad)

    return Case(
        f"grouped_attention-{fault}",
        lambda: (GroupedAttention(), torch.randn(2, 5, 16, requires_grad=True)),
        spmd=lambda module, world: Parallel(PartGroupedAttention(world, fault), synchronise=synchronise),
        placements={"q.weight": "S(0)", "q.bias": "S(0)", "out.weight": "S(1)"},
    )


PLANTED.plant(
    grouped,
    {
        "wrong_group_of_heads": ("swapped q/k/v", "output"),
        "scale_of_own_width": ("attention scale", "output"),
        "keys_not_synchronised": ("backward all-reduce: missing", "k.weight.grad"),
    },
)

CASES = list(PLANTED.cases())
