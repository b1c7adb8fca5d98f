"""Norms whose statistics go over the ranks: batch norm on a split batch, RMS norm on split features."""

from __future__ import annotations

import torch
import torch.distributed as dist
from planted import Planted, share_over_ranks, sum_gradients
from torch import nn

from sbp import Case, Parallel, World

__all__ = ["CASES"]

PLANTED = Planted()


class SynchronisedBatchNorm(nn.Module):
    """BatchNorm1d of a batch of which each rank has some rows."""

    def __init__(self, module: nn.BatchNorm1d, world: World, fault: str) -> None:
        super().__init__()
        features = module.num_features
        self.eps, self.momentum = module.eps, module.momentum
        self.weight, self.bias = nn.Parameter(torch.empty(features)), nn.Parameter(torch.empty(features))
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(features))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long))
        self.world, self.fault = world, fault

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        world, fault = self.world, self.fault

        def over_ranks(x: torch.Tensor) -> torch.Tensor:
            if fault == "local_statistics":
                return x * world.size
            return share_over_ranks(
                x, world, backward="no" if fault == "statistics_not_reduced_back" else "sum"
            )

        rows = len(input)
        count = torch.tensor(float(rows))
        dist.all_reduce(count)
        n = count.item()
        if fault == "mean_of_means":
            mean = over_ranks(input.mean(0)) / world.size
        elif fault == "local_statistics":
            mean = input.mean(0)
        else:
            mean = over_ranks(input.sum(0)) / n
        square = (input - mean).square()
        var = square.mean(0) if fault == "local_statistics" else over_ranks(square.sum(0)) / n
        self.track(input, mean, var, n)
        if fault == "unbiased":
            var = var * n / (n - 1)
        root = var.sqrt() + self.eps if fault == "eps_outside" else (var + self.eps).sqrt()
        if fault == "no_eps":
            root = var.sqrt()
        return (input - mean) / root * self.weight + self.bias

    @torch.no_grad()
    def track(self, input: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, n: float) -> None:
        fault, momentum = self.fault, self.momentum
        if fault == "momentum_swapped":
            momentum = 1 - momentum
        if fault == "own_mean":
            mean = input.mean(0)
        if fault != "running_var_biased":
            var = var * n / (n - 1)
        if fault == "running_var_of_root":
            var = var + self.eps
        self.running_mean.lerp_(mean, momentum)
        if fault == "momentum_each_rank":
            momentum = 1 - (1 - momentum) ** self.world.size
        self.running_var.lerp_(var, momentum)
        if fault != "not_tracked":
            self.num_batches_tracked += self.world.size if fault == "tracked_each_rank" else 1


def batch_norm(fault: str) -> Case:
    return Case(
        f"batch_norm-{fault}",
        lambda: (nn.BatchNorm1d(5), torch.randn(10, 5, requires_grad=True)),
        spmd=lambda module, world: Parallel(
            SynchronisedBatchNorm(module, world, fault), synchronise=sum_gradients
        ),
        placements={"input": "S(0)", "output": "S(0)"},
    )


PLANTED.plant(
    batch_norm,
    {
        "local_statistics": ("forward all-reduce: missing", "output"),
        "mean_of_means": ("averaged uneven shards", "output"),
        "statistics_not_reduced_back": ("backward all-reduce: missing", "input.grad"),
        "unbiased": ("running statistics", "output"),
        "running_var_biased": ("running statistics", "running_var"),
        "own_mean": ("running statistics", "running_mean"),
        "running_var_of_root": ("running statistics", "running_var"),
        "momentum_swapped": ("momentum of the running statistics", "running_mean"),
        "momentum_each_rank": ("momentum of the running statistics", "running_var"),
        "not_tracked": ("number of batches", "num_batches_tracked"),
        "tracked_each_rank": ("number of batches", "num_batches_tracked"),
        "eps_outside": ("eps inside or outside the root", "output"),
        "no_eps": ("eps inside or outside the root", "output"),
    },
)


class SplitRMSNorm(nn.Module):
    """RMS norm of features of which each rank has some."""

    def __init__(self, module: nn.RMSNorm, world: World, fault: str) -> None:
        super().__init__()
        [self.features] = module.normalized_shape
        self.eps = module.eps or 0.0
        self.weight = nn.Parameter(torch.empty(self.features // world.size))
        self.world, self.fault = world, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fault = self.fault
        total = share_over_ranks(
            x.square().sum(-1, keepdim=True),
            self.world,
            forward="missing" if fault == "missing" else "sum",
            backward="missing" if fault == "not_back" else "sum",
        )
        mean = total / (x.shape[-1] if fault == "own_features" else self.features)
        if fault == "eps_outside":
            return x / (mean.sqrt() + self.eps) * self.weight
        if fault == "eps_each_rank":
            mean = mean + (self.world.size - 1) * self.eps
        return x / (mean + self.eps).sqrt() * self.weight


def rms_norm(fault: str) -> Case:
    return Case(
        f"rms_norm-{fault}",
        lambda: (nn.RMSNorm(16, eps=1e-5), torch.randn(3, 16, requires_grad=True)),
        spmd=lambda module, world: SplitRMSNorm(module, world, fault),
        placements={"x": "S(1)", "output": "S(1)", "weight": "S(0)"},
    )


PLANTED.plant(
    rms_norm,
    {
        "missing": ("forward all-reduce: missing", "output"),
        "not_back": ("backward all-reduce: missing", "x.grad"),
        "own_features": ("averaged uneven shards", "output"),
        "eps_outside": ("eps inside or outside the root", "output"),
        "eps_each_rank": ("eps inside or outside the root", "output"),
    },
)

CASES = list(PLANTED.cases())
