"""Optimizer steps of a model whose weights are split: clipping, weight decay, schedules, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from planted import Planted
from tensor_parallel import MLP, SPLIT, PartMLP
from torch import nn

from sbp import Case, Parallel, Train, World

__all__ = ["CASES"]

PLANTED = Planted()


def schedule(fault: str) -> Case:
    def make(delay: int) -> Callable[[Any], Any]:
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 ** max(step - delay, 0)
        )

    def parallel(module: nn.Module, world: World) -> Parallel:
        late = fault == "late" or (fault == "late_on_one_rank" and world.rank == 3)
        return Parallel(PartMLP(world, "none"), schedule=make(int(late)))

    return Case(
        f"schedule-{fault}",
        lambda: (MLP(), torch.randn(4, 8)),
        spmd=parallel,
        placements=SPLIT,
        train=Train(steps=2, schedule=make(0)),
    )


PLANTED.plant(
    schedule,
    {
        "late": ("scheduler one step late", "learning rate 0 after step 1"),
        "late_on_one_rank": ("scheduler one step late", "learning rate 0 after step 1"),
    },
)

LIMIT = 0.5


def clip(fault: str) -> Case:
    def parallel(module: nn.Module, world: World) -> Parallel:
        mlp = PartMLP(world, "none")

        def clip(parameters: list[torch.Tensor]) -> torch.Tensor:
            whole = torch.zeros((), dtype=torch.float64)
            for name, parameter in mlp.named_parameters():
                # What all ranks have counts once.
                if name in SPLIT or fault == "replicated_on_every_rank" or world.rank == 0:
                    whole += parameter.grad.pow(2).sum()
            own = whole.sqrt()
            if fault == "norm_of_norms":
                dist.all_reduce(whole.sqrt_())
                norm = whole
            elif fault == "own_shard":
                norm = own
            else:
                dist.all_reduce(whole)
                norm = whole.sqrt()
            used = own if fault == "factor_of_own_shard" else norm
            for parameter in parameters:
                if fault != "bias_not_clipped" or parameter is not mlp.down.bias:
                    parameter.grad.mul_(torch.clamp(LIMIT / (used + 1e-6), max=1.0))
            return norm

        return Parallel(mlp, clip=clip)

    return Case(
        f"clip-{fault}",
        lambda: (MLP(), torch.randn(4, 8)),
        spmd=parallel,
        placements=SPLIT,
        train=Train(steps=2, clip_norm=LIMIT),
    )


PLANTED.plant(
    clip,
    {
        "own_shard": ("clip norm of one shard", "total norm"),
        "replicated_on_every_rank": ("clip norm of one shard", "total norm"),
        "norm_of_norms": ("clip norm of one shard", "total norm"),
        "factor_of_own_shard": ("clip norm of one shard", "up.weight"),
        "bias_not_clipped": ("clip norm of one shard", "down.bias"),
    },
)

Named = list[tuple[str, torch.nn.Parameter]]


def with_groups(named: Named, decayed: Callable[[str], bool]) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter for name, parameter in named if decayed(name)], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in named if not decayed(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def is_matrix(name: str) -> bool:
    return name.endswith("weight")


def decay(fault: str) -> Case:
    def parallel(module: nn.Module, world: World) -> Parallel:
        def decayed(name: str) -> bool:
            if fault == "biases_too":
                return True
            if fault == "swapped_on_one_rank" and world.rank == 3:
                return not is_matrix(name)
            if fault == "first_rank_alone":
                return is_matrix(name) and (name != "down.weight" or world.rank == 0)
            return is_matrix(name)

        return Parallel(PartMLP(world, "none"), optimizer=lambda named: with_groups(named, decayed))

    return Case(
        f"decay-{fault}",
        lambda: (MLP(), torch.randn(4, 8)),
        spmd=parallel,
        placements=SPLIT,
        train=Train(steps=2, optimizer=lambda named: with_groups(named, is_matrix)),
    )


PLANTED.plant(
    decay,
    {
        "biases_too": ("weight decay on the wrong shard", "up.bias"),
        "swapped_on_one_rank": ("weight decay on the wrong shard", "up.weight"),
        "first_rank_alone": ("weight decay on the wrong shard", "down.weight"),
    },
)


class OwnPartOptimizer(torch.optim.AdamW):
    """ZeRO's first stage: each parameter is updated by its owner, who then sends it to the others."""

    def __init__(self, named: Named, world: World, fault: str) -> None:
        parameters = [parameter for _, parameter in named]
        super().__init__(parameters, lr=0.01)
        self.all, self.world, self.fault = parameters, world, fault

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        before = [parameter.clone() for parameter in self.all]
        super().step()
        for index, parameter in enumerate(self.all):
            owner = index % self.world.size
            if self.world.rank != owner:
                parameter.copy_(before[index])
                self.state.pop(parameter)
            if self.fault == "wrong_owner" and index == 2:
                owner = (owner + 1) % self.world.size
            if self.fault != "not_sent" or index != 1:
                dist.broadcast(parameter, owner)


def zero(fault: str) -> Case:
    def parallel(module: nn.Module, world: World) -> Parallel:
        return Parallel(MLP(), optimizer=lambda named: OwnPartOptimizer(named, world, fault))

    return Case(
        f"zero-{fault}",
        lambda: (MLP(), torch.randn(4, 8)),
        spmd=parallel,
        # Only the owner has the state, so one step is all that a state made anew each time is right for.
        train=Train(steps=1, optimizer=partial(torch.optim.AdamW, lr=0.01)),
    )


def checkpoint(fault: str) -> Case:
    """Saves after the first step, loads into a new module and optimizer, and goes on."""

    def parallel(module: nn.Module, world: World) -> Parallel:
        def path(folder: str, rank: int) -> str:
            return os.path.join(folder, f"{rank}.pt")

        def save(module: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
            torch.save([module.state_dict(), optimizer.state_dict()], path(folder, world.rank))

        def load(module: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
            state, kept = torch.load(path(folder, world.rank))
            module.load_state_dict(state)
            if fault == "not_loaded":
                return
            other = torch.load(path(folder, (world.rank + 1) % world.size))[1]["state"]
            if fault == "state_of_next_rank":
                kept["state"] = other
            for index, entry in kept["state"].items():
                if fault == "second_moment_stale" and index == 2:
                    entry["exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])
                if fault == "step_restarted":
                    entry["step"] = torch.zeros_like(entry["step"])
                if fault == "one_bias_of_next_rank" and index == 1:
                    entry["exp_avg"] = other[1]["exp_avg"]
            optimizer.load_state_dict(kept)
            if fault == "first_rank_only" and world.rank > 0:
                optimizer.state.clear()

        return Parallel(PartMLP(world, "none"), save=save, load=load)

    return Case(
        f"checkpoint-{fault}",
        lambda: (MLP(), torch.randn(4, 8)),
        spmd=parallel,
        placements=SPLIT,
        train=Train(steps=3, optimizer=partial(torch.optim.AdamW, lr=0.01), save_after=1),
    )


LOADED = "after loading (step 1)"
PLANTED.plant(
    checkpoint,
    {
        "not_loaded": ("optimizer state stale after loading", f"exp_avg of up.weight {LOADED}"),
        "state_of_next_rank": ("optimizer state stale after loading", f"exp_avg of up.weight {LOADED}"),
        "second_moment_stale": ("optimizer state stale after loading", f"exp_avg_sq of down.weight {LOADED}"),
        "step_restarted": ("optimizer state stale after loading", f"step of up.weight {LOADED}"),
        "one_bias_of_next_rank": ("optimizer state stale after loading", f"exp_avg of up.bias {LOADED}"),
        "first_rank_only": ("optimizer state stale after loading", f"exp_avg of up.weight {LOADED}"),
    },
)
PLANTED.plant(
    zero,
    {
        "wrong_owner": ("sharded optimizer", "down.weight"),
        "not_sent": ("sharded optimizer", "up.bias"),
    },
)

CASES = list(PLANTED.cases())
