"""Each rank has some of the batch, and all the weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import Planted
from torch import nn

from sbp import Case, Parallel, Train, World, call

__all__ = ["CASES"]

PLANTED = Planted()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def even(fault: str) -> Case:
    """Shards of the same size: the mean of the ranks' means and of their gradients."""

    def parallel(module: nn.Module, world: World) -> Parallel:
        module = Classifier()

        def synchronise(module: nn.Module) -> None:
            for name, parameter in module.named_parameters():
                if fault == "not_synchronised" and name == "body.bias":
                    continue
                dist.all_reduce(parameter.grad)
                if fault == "twice" and name == "head.weight":
                    dist.all_reduce(parameter.grad)
                parameter.grad /= world.size ** (2 if fault == "divided_twice" else fault != "sum")

        if fault == "every_micro_batch":
            # The second time, what the first micro-batch has left is added up again.
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        return Parallel(module, synchronise=synchronise)

    return Case(
        f"even-{fault}",
        lambda: call(Classifier(), torch.randn(8, 6)).against(torch.randint(5, (8,))),
        spmd=parallel,
        placements={"x": "S(0)", "output": "S(0)", "target": "S(0)"},
        loss=F.cross_entropy,
        mean_over=("ranks",),
        train=Train(steps=2, accumulate=2),
    )


PLANTED.plant(
    even,
    {
        "sum": ("gradient scaled by ranks", "body.weight.grad"),
        "divided_twice": ("gradient scaled by ranks", "body.weight.grad"),
        "not_synchronised": ("backward all-reduce: missing", "body.bias.grad"),
        "twice": ("backward all-reduce: doubled", "head.weight.grad"),
        "every_micro_batch": ("backward all-reduce: doubled", "body.weight.grad"),
    },
)


def uneven(fault: str) -> Case:
    """Shards of 3, 3, 3 and 1: a rank's mean weighs as much as it has rows."""

    def parallel(module: nn.Module, world: World) -> Parallel:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            count = torch.tensor(float(len(target)))
            dist.all_reduce(count)
            share = F.cross_entropy(output, target, reduction="sum") / count.item()
            mean = F.cross_entropy(output, target) / world.size
            if fault == "mean_of_means":
                return mean
            if fault == "backward_of_means":
                return mean + (share - mean).detach()
            return share

        def synchronise(module: nn.Module) -> None:
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)

        return Parallel(Classifier(), loss=loss, synchronise=synchronise)

    return Case(
        f"uneven-{fault}",
        lambda: call(Classifier(), torch.randn(10, 6, requires_grad=True)).against(torch.randint(5, (10,))),
        spmd=parallel,
        placements={"x": "S(0)", "output": "S(0)", "target": "S(0)", "loss": "P"},
        loss=F.cross_entropy,
    )


PLANTED.plant(
    uneven,
    {
        "mean_of_means": ("averaged uneven shards", "loss"),
        "backward_of_means": ("averaged uneven shards", "x.grad"),
    },
)

CASES = list(PLANTED.cases())
