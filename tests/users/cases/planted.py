"""Correct parallel code with one fault each. ``EXPECTED`` says what has to be found first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from right import DropoutOfEachRank, Tied, batch, ddp, dropout, mlp, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sbp import Case, Parallel, Train, World, case, fused
from sbp.subjects.planned import load_checkpoint, save_checkpoint

EXPECTED: dict[str, tuple[str, str]] = {}
__all__ = []


def plant(verdict: str, quantity: str, planted: Case) -> None:
    EXPECTED[planted.name] = verdict, quantity
    globals()[planted.name] = planted
    __all__.append(planted.name)


# ------------------------------------------------------------------------------------------------ plans


def not_reduced(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


data_parallel = Case(
    "data_parallel",
    mlp,
    plan=ddp,
    mean_over="ranks",
    placements=batch,
    train=Train(steps=2, optimizer="AdamW"),
)
plant("ranks disagree", "up.weight.grad of step 1", data_parallel.variant("not_reduced", plan=not_reduced))
# Gradients are averaged, but the loss is a sum over the batch.
plant("wrong gradient", "up.weight.grad of step 1", data_parallel.variant("averaged_sum", mean_over=()))


def scaled(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.down.weight.register_hook(lambda gradient: gradient * mesh.size())
    return DDP(module)


DDP = nn.parallel.DistributedDataParallel
plant(
    "wrong gradient", "down.weight.grad of step 1", data_parallel.variant("one_gradient_scaled", plan=scaled)
)


def nothing_split(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"upp": ColwiseParallel()})


plant(
    "wrong layout",
    "up.weight.grad",
    Case("misspelt_plan", mlp, plan=nothing_split, placements={"up.weight": "S(0)"}),
)


def other_split(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


plant(
    "wrong layout",
    "up.weight.grad",
    Case("split_otherwise", mlp, plan=other_split, placements={"up.weight": "S(1)"}),
)


def untied(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    return module


def tokens() -> Any:
    return Tied(), torch.randint(12, (4, 3))


plant("wrong gradient", "table.weight.grad", Case("untied", tokens, plan=untied))


def stale_optimizer(module: nn.Module, mesh: DeviceMesh) -> Parallel:
    shard(module, mesh)

    def load(module: nn.Module, optimizer: Any, folder: str) -> None:
        load_checkpoint(module, torch.optim.AdamW(module.parameters()), folder)

    return Parallel(module, save=save_checkpoint, load=load)


plant(
    "wrong state",
    "exp_avg of up.weight after loading (step 1)",
    data_parallel.variant(
        "stale_optimizer", plan=stale_optimizer, train=Train(optimizer="AdamW", save_after=1)
    ),
)


def parameters_not_loaded(module: nn.Module, mesh: DeviceMesh) -> Parallel:
    shard(module, mesh)
    return Parallel(module, save=save_checkpoint, load=lambda module, optimizer, folder: None)


plant(
    "wrong state",
    "up.weight after loading (step 1)",
    data_parallel.variant("nothing_loaded", plan=parameters_not_loaded, train=Train(save_after=1)),
)


def late(module: nn.Module, mesh: DeviceMesh) -> Parallel:
    lag = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** max(step - 1, 0))  # noqa: E731
    return Parallel(DDP(module), schedule=lag)


halving = Train(
    schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
)
plant(
    "wrong state",
    "learning rate 0 after step 1",
    data_parallel.variant("late_schedule", plan=late, train=halving),
)


def clipped_by_part(module: nn.Module, mesh: DeviceMesh) -> Parallel:
    other_split(module, mesh)

    def clip(parameters: list[nn.Parameter]) -> Any:
        gradients = [p.grad.to_local() for p in parameters]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_((0.1 / norm).clamp(max=1))
        return norm

    return Parallel(module, clip=clip)


plant(
    "ranks disagree",
    "total norm of step 1",
    Case("clipped_by_part", mlp, plan=clipped_by_part, train=Train(clip_norm=0.1)),
)


def late_rank(module: nn.Module, mesh: DeviceMesh) -> Parallel:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 2:
            return x
        return module(x)

    return Parallel(DDP(module), forward=forward)


plant("ranks disagree", "output", Case("one_rank_differs", mlp, plan=late_rank))


# ---------------------------------------------------------------------------------------- per-rank code


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class PartMLP(nn.Module):
    """Some of the hidden units on each rank, with the fault that ``fault`` names."""

    def __init__(self, world: World, fault: str) -> None:
        super().__init__()
        own = 16 // world.size
        self.up = nn.Linear(8, own)
        self.down = nn.Linear(own, 8)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.fault == "gradient" else SumBackward.apply(x)
        hidden = torch.tanh(self.up(x))
        part = F.linear(hidden, self.down.weight)
        if self.fault == "bias":
            return SumForward.apply(part + self.down.bias)
        return (part if self.fault == "sum" else SumForward.apply(part)) + self.down.bias


split = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}


def parted(fault: str) -> Case:
    return Case(f"fault_in_{fault}", mlp, spmd=lambda module, world: PartMLP(world, fault), placements=split)


right = parted("nothing")
plant("ranks disagree", "x.grad", parted("gradient"))
plant("ranks disagree", "output", parted("sum"))
plant("wrong value", "output", parted("bias"))


class ThreeInOne(nn.Module):
    def __init__(self, features: int, ranks: int, order: tuple[int, ...]) -> None:
        super().__init__()
        self.qkv = nn.Linear(features, 3 * features // ranks, bias=False)
        self.order = order

    def forward(self, x: torch.Tensor) -> Any:
        parts = self.qkv(SumBackward.apply(x)).chunk(3, -1)
        return tuple(parts[index] for index in self.order)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x), self.v(x)


def three(order: tuple[int, ...]) -> Case:
    return Case(
        f"order_{'_'.join(map(str, order))}",
        lambda: (Three(), torch.randn(3, 8, requires_grad=True)),
        spmd=lambda module, world: ThreeInOne(8, world.size, order),
        placements={**{f"{name}.weight": "S(0)" for name in "qkv"}, "output": "S(1)"},
        parameters={"qkv.weight": fused("q.weight", "k.weight", "v.weight")},
    )


in_order = three((0, 1, 2))
plant("wrong value", "output[1]", three((0, 2, 1)))

plant(
    "wrong value",
    "output",
    dropout.variant("dropout_repeated", spmd=lambda module, world: DropoutOfEachRank(1)),
)
plant("ranks disagree", "output", dropout.variant("dropout_of_replicas", placements={}))


@case(spmd=lambda module, world: PartMLP(world, "nothing"))
def nothing_declared():
    return mlp()


EXPECTED["nothing_declared"] = "error", ""
__all__ += ["in_order", "nothing_declared", "right"]
