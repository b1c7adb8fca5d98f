"""Plans, and operators whose sharding rules in DTensor are right, in random sizes: nothing may be called wrong.

Operators are tried under many placements of their operands, partial ones and uneven and empty pieces among them. Sizes
and values depend on the kind of case and its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from sbp import Case, call
from sbp.trial import stable_seed

__all__ = ["CASES"]

# An operator is tried under many placements, a plan under its own alone: so there are more of these.
ROUNDS = 12
OF_PLANS = 3
# Numbers that 2 and 4 ranks divide.
EVEN = (4, 8, 12, 20, 32, 48)

Make = Callable[[str, random.Random], Case]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def planned(name: str, draw: random.Random) -> Case:
    features, hidden, batch = draw.choice(EVEN), draw.choice(EVEN), draw.randint(1, 20)

    def plan(module: nn.Module, mesh: Any) -> nn.Module:
        return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return Case(name, lambda: (MLP(features, hidden), tensor(batch, features)), plan=plan)


class Block(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(features), MLP(features, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def fsdp(name: str, draw: random.Random) -> Case:
    features, hidden, batch = draw.randint(2, 20), draw.randint(2, 30), 4 * draw.randint(1, 5)

    def plan(module: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(module, mesh=mesh)

    return Case(
        name,
        lambda: call(Block(features, hidden), torch.randn(batch, features)).against(
            torch.randn(batch, features)
        ),
        plan=plan,
        placements={"x": "S(0)", "output": "S(0)", "target": "S(0)"},
        loss=F.mse_loss,
        mean_over=("ranks",),
    )


# ------------------------------------------------------------------------------------------- operators


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def pointwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(a) * b + a.sigmoid()


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(0), x.mean(-1)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).exp()


def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def operator(function: Callable[..., Any], shapes: Callable[..., list[tuple[int, ...]]]) -> Make:
    def make(name: str, draw: random.Random) -> Case:
        sizes = [draw.randint(1, 33) for _ in range(3)]
        return Case(name, lambda: (function, *(tensor(*shape) for shape in shapes(*sizes))))

    return make


PLANS: dict[str, Make] = {"column_row": planned, "fsdp": fsdp}
OPERATORS: dict[str, Make] = {
    "linear": operator(linear, lambda n, k, m: [(n, k), (m, k), (m,)]),
    "matmul": operator(matmul, lambda n, k, m: [(n, k), (k, m)]),
    "pointwise": operator(pointwise, lambda n, k, m: [(n, k), (k,)]),
    "softmax": operator(softmax, lambda n, k, m: [(n, m, k)]),
    "sums": operator(sums, lambda n, k, m: [(n, m, k)]),
    "transposed": operator(transposed, lambda n, k, m: [(n, m)]),
    "normalised": operator(normalised, lambda n, k, m: [(n, k + 2), (k + 2,), (k + 2,)]),
}

CASES = [
    make(f"{kind}-{number}", random.Random(stable_seed("honest", kind, number)))
    for start in range(ROUNDS)
    for kinds, count in ((PLANS, OF_PLANS), (OPERATORS, 1))
    for kind, make in kinds.items()
    for number in range(start * count, (start + 1) * count)
]
