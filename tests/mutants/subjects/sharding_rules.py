"""Operators with sharding rules of their own, registered with DTensor: each planted rule says what is not so.

A rule is a list of signatures, results first: what the placements of the results are under those of the operands. Every
fault has an operator to itself, since a rule stays registered for the life of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from planted import Planted
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sbp import Case

__all__ = ["CASES"]

PLANTED = Planted()
B, P = Replicate(), Partial()
S = [Shard(0), Shard(1)]
Signature = tuple[list[Any], list[Any]]
KIND = "sharding rule of DTensor"


def register(name: str, compute: Callable[..., torch.Tensor], operands: int, rule: list[Signature]) -> Any:
    """An operator of one or two tensors under that name, and its rule."""

    def one(x: torch.Tensor) -> torch.Tensor:
        return compute(x).clone()

    def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return compute(x, y).clone()

    function: Any = one if operands == 1 else two
    made = torch.library.custom_op(f"planted::{name}", function, mutates_args=(), schema=None)
    made.register_fake(function)
    register_sharding(getattr(torch.ops.planted, name).default)(lambda *operands: rule)
    return made


def everywhere(operands: int) -> Signature:
    return [B], [B] * operands


class Operator:
    """One operator, its true rule, and untrue ones by name."""

    def __init__(
        self,
        name: str,
        compute: Callable[..., torch.Tensor],
        shapes: list[tuple[int, ...]],
        true: list[Signature],
        untrue: dict[str, Signature],
    ) -> None:
        self.name, self.compute, self.shapes, self.true, self.untrue = name, compute, shapes, true, untrue
        PLANTED.plant(self.case, dict.fromkeys(untrue, (KIND, "output")))

    def case(self, fault: str) -> Case:
        count = len(self.shapes)
        rule = [everywhere(count), *self.true]
        if fault in self.untrue:
            rule = [everywhere(count), self.untrue[fault]]
        operator = register(f"{self.name}_{fault}", self.compute, count, rule)

        class Call(nn.Module):
            def forward(self, *operands: torch.Tensor) -> Any:
                return operator(*operands)

        # One operand after the other is off B; the rest of the choices is the planner's.
        return Case(
            f"{self.name}-{fault}",
            lambda: (Call(), *(torch.randn(*shape) for shape in self.shapes)),
            gradients=False,
        )


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1)


Operator("square", torch.square, [(8, 4)], [([s], [s]) for s in S], {"of_part": ([P], [P])})
Operator("softmax", softmax, [(8, 4)], [([S[0]], [S[0]])], {"along_split": ([S[1]], [S[1]])})
Operator(
    "total",
    lambda x: x.sum(0),
    [(8, 4)],
    [([P], [S[0]]), ([P], [P])],
    {"not_partial": ([B], [S[0]]), "claims_average": ([Partial("avg")], [S[0]])},
)
Operator("mean", lambda x: x.mean(0), [(8, 4)], [([P], [P])], {"sum_of_means": ([P], [S[0]])})
Operator("flip", lambda x: x.flip(0), [(8, 4)], [([S[1]], [S[1]])], {"along_split": ([S[0]], [S[0]])})
Operator("running", lambda x: x.cumsum(0), [(8, 4)], [([S[1]], [S[1]])], {"along_split": ([S[0]], [S[0]])})
Operator("largest", lambda x: x.amax(0), [(8, 4)], [([Partial("max")], [S[0]])], {"as_sum": ([P], [S[0]])})
Operator("turned", lambda x: x.t(), [(8, 8)], [([S[1]], [S[0]])], {"not_turned": ([S[0]], [S[0]])})
Operator(
    "product",
    torch.matmul,
    [(8, 8), (8, 8)],
    [([P], [S[1], S[0]]), ([S[0]], [S[0], B]), ([S[1]], [B, S[1]])],
    {"not_partial": ([B], [S[1], S[0]]), "part_by_part": ([P], [P, P])},
)
Operator(
    "plus",
    torch.add,
    [(8, 4), (8, 4)],
    [([P], [P, P]), *(([s], [s, s]) for s in S)],
    {"to_part": ([P], [P, B])},
)
Operator("sorted", lambda x: x.sort(0).values, [(8, 4)], [([S[1]], [S[1]])], {"shards": ([S[0]], [S[0]])})

CASES = list(PLANTED.cases())
