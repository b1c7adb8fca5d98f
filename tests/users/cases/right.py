"""Correct parallel code of every kind that a case can describe; all of it must pass on four ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sbp import Parallel, Train, World, call, case


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def mlp() -> Any:
    return MLP(), torch.randn(8, 8, requires_grad=True)


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module)


# ------------------------------------------------------------------------------------------- outputs


@case(spmd=lambda module, world: F.linear, placements={"x": "S(1)", "weight": "S(1)", "output": "P"})
def partial_sum():
    """The pieces of a sum, left to whoever wants them."""
    return linear, torch.randn(3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


class MeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@case(plan=ddp, mean_over="ranks", placements={"x": "S(0)", "output": "P(avg)"})
def loss_inside_the_module():
    return MeanSquare(), torch.randn(8, 8, requires_grad=True)


class Nested(nn.Module):
    """Tensors inside of dictionaries and tuples, as arguments and as results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: Any, *, options: Any) -> Any:
        x = self.layer(pair[0]) * options["scale"]
        return {"sum": x + pair[1], "parts": (x, pair[1] * 2)}


@case(plan=ddp, mean_over="ranks", placements={"pair": "S(0)", "output": "S(0)", "output.parts[1]": "S(0)"})
def nested():
    pair = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)
    return call(Nested(), pair, options={"scale": torch.tensor(1.5)})


def columns_as_dtensor(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    return parallelize_module(module, mesh["tp"], plan)


# The output is a DTensor on the tensor-parallel axis alone; along the other one it lies as declared.
dtensor_on_one_axis = case(
    name="dtensor_on_one_axis",
    plan=columns_as_dtensor,
    axes=("dp", "tp"),
    placements={
        "x": {"dp": "S(0)"},
        "output": {"dp": "S(0)", "tp": "S(1)"},
        **{
            f"{name}.grad": {"dp": "P", "tp": sbp}
            for name, sbp in [("up.weight", "S(0)"), ("up.bias", "S(0)")]
        },
        "down.weight.grad": {"dp": "P", "tp": "S(1)"},
        "down.bias.grad": {"dp": "P"},
    },
)(mlp)


# -------------------------------------------------------------------------------------------- wrappers


def recomputed_and_compiled(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.up = checkpoint_wrapper(module.up)
    return DistributedDataParallel(torch.compile(module, backend="eager"))


batch = {"x": "S(0)", "output": "S(0)"}
wrapped = case(
    name="wrapped", plan=recomputed_and_compiled, mean_over="ranks", placements=batch, train=Train(steps=2)
)(mlp)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(tokens)))


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)


@case(
    plan=shard,
    mean_over="ranks",
    placements={"tokens": "S(0)", "output": "S(0)"},
    train=Train(optimizer="AdamW"),
)
def tied_weights():
    return Tied(), torch.randint(12, (8, 3))


def rows_by_hand(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def split(name: str, child: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in child.named_parameters(recurse=False):
            child.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    return distribute_module(
        module,
        mesh,
        split,
        lambda child, inputs, mesh: tuple(distribute_tensor(x, mesh, [Replicate()]) for x in inputs),
        lambda child, output, mesh: output.redistribute(mesh, [Replicate()]).to_local(),
    )


@case(plan=rows_by_hand, placements={"weight": "S(0)", "bias": "S(0)"})
def distributed_module():
    return nn.Linear(8, 12), torch.randn(3, 8)


def zero(module: nn.Module, mesh: DeviceMesh) -> Parallel:
    """Each rank keeps the optimizer's state of some of the parameters."""

    def optimizer(named: Any) -> Any:
        return ZeroRedundancyOptimizer([p for _, p in named], torch.optim.AdamW, lr=1e-3, foreach=False)

    return Parallel(DistributedDataParallel(module), optimizer=optimizer)


sharded_optimizer = case(
    name="sharded_optimizer",
    plan=zero,
    mean_over="ranks",
    placements=batch,
    train=Train(steps=3, optimizer="AdamW"),
)(mlp)


# ---------------------------------------------------------------------------------------- per-rank code


class BatchNormOverRanks(nn.Module):
    """Batch normalisation over all ranks' samples, with its running statistics."""

    def __init__(self, features: int, world: World) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.bias = nn.Parameter(torch.empty(features))
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))
        self.register_buffer("num_batches_tracked", torch.empty((), dtype=torch.int64))
        self.register_buffer("own", torch.arange(3.0))  # not the reference's: not compared
        self.world = world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0] * self.world.size
        mean = AllReduce.apply(x.sum(0)) / count
        variance = AllReduce.apply((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * count / (count - 1), 0.1)
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


class AllReduce(torch.autograd.Function):
    """A sum over the ranks whose result every rank goes on with: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def sum_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)


@case(
    spmd=lambda module, world: Parallel(
        BatchNormOverRanks(module.num_features, world), synchronise=sum_gradients
    ),
    placements={"input": "S(0)", "output": "S(0)"},
    train=Train(steps=3, optimizer="SGD:momentum", accumulate=2, save_after=1),
)
def batch_norm():
    return nn.BatchNorm1d(3), torch.randn(8, 3, requires_grad=True)


class DropoutOfEachRank(nn.Module):
    """Dropout whose pattern is each rank's own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return F.dropout(x, 0.5, self.training)


@case(
    spmd=lambda module, world: DropoutOfEachRank(world.rank),
    random=True,
    placements={"input": "S(0)", "output": "S(0)"},
)
def dropout():
    return nn.Dropout(0.5), torch.ones(8, 16, requires_grad=True)


__all__ = [
    "batch_norm",
    "distributed_module",
    "dropout",
    "dtensor_on_one_axis",
    "loss_inside_the_module",
    "nested",
    "partial_sum",
    "sharded_optimizer",
    "tied_weights",
    "wrapped",
]
