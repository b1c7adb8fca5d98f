"""Run by test_watch_on_ranks.py: scenarios on four real ranks. Prints {scenario: [what each rank returned]} as JSON."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sbp.inplace import Watch, watch

RANKS = 4
S0, S1, B, P = Shard(0), Shard(1), Replicate(), Partial()


def place(mesh: Any, placement: Any, shape: tuple[int, ...] = (8, 4), seed: int = 0) -> DTensor:
    full = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return place_full(mesh, [placement] * mesh.ndim, full)


def place_full(mesh: Any, placements: Any, full: torch.Tensor) -> DTensor:
    local = full
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            local = local.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
        elif placement.is_partial():
            local = local * (0.1 if mesh.get_local_rank(axis) else 1 - 0.1 * (mesh.size(axis) - 1))
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def told(seen: Watch) -> list[list[Any]]:
    """What must be the same on all ranks: source, outcome, compared, message."""
    return [[one.source, one.outcome, one.compared, one.message.split("(made at")[0]] for one in seen.records]


def known_cases(mesh: Any) -> Any:
    """The faults that are known of this torch."""
    index = place_full(mesh, [S0], torch.zeros(8, 4, dtype=torch.int64))
    with watch() as seen:
        x = place(mesh, P)
        x.fill_(3)
        x = place(mesh, P)
        nn.functional.hardswish(x, inplace=True)
        x = place(mesh, S0)
        x[:2].zero_()
        x.select(0, 3).zero_()
        x.scatter_add_(0, index, place(mesh, S0))
        x = place(mesh, P)
        try:
            x += 1
        except RuntimeError:
            pass
        x = place(mesh, S0)
        x.data = place(mesh, B)
        x = place(mesh, S0)
        x += place(mesh, P)
        x *= place(mesh, B)
        x.add_(place(mesh, S1))
        torch._foreach_mul_([x, place(mesh, B)], 2.0)
    return told(seen)


def two_axes(mesh: Any) -> Any:
    """On a mesh of 2 x 2, and on its rows alone: each row meets by itself."""
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(32.0).reshape(8, 4)
    with watch() as seen:
        x = place_full(grid, [S0, P], full)
        x += place_full(grid, [P, P], full)
        x.fill_(3)
        row = place_full(grid["tp"], [P], full)
        row.fill_(3)
        row = place_full(grid["tp"], [S0], full)
        row += place_full(grid["tp"], [P], full)
    return told(seen)


def one_rank_writes(mesh: Any) -> Any:
    """Rank 0 alone writes. That needs nobody else, and must not with the watch either."""
    x = place(mesh, P)
    begin = time.monotonic()
    with watch(x, patience=1.0) as seen:
        if dist.get_rank() == 0:
            x.zero_()
        x.redistribute(placements=[B])
        if dist.get_rank() == 0:
            x.fill_(1)
        total = x.redistribute(placements=[B]).to_local().sum()
    return {"told": told(seen), "seconds": time.monotonic() - begin, "total": float(total)}


def another_order(mesh: Any) -> Any:
    """Ranks write to two tensors in different order: none of it needs the others."""
    x, y = place(mesh, P), place(mesh, P)

    def write_x() -> None:
        x.zero_()

    def write_y() -> None:
        y.mul_(2)

    with watch(x, y, patience=1.0) as seen:
        for write in (write_x, write_y) if dist.get_rank() else (write_y, write_x):
            write()
        total = y.redistribute(placements=[B]).to_local().sum()
    return {"told": sorted(told(seen)), "total": float(total)}


def one_rank_comes_late(mesh: Any) -> Any:
    """A rank that is slower than the others' patience: nobody is left waiting in a collective."""
    x = place(mesh, P)
    with watch(x, patience=0.5) as seen:
        if dist.get_rank() == 2:
            time.sleep(2)
        for _ in range(2):
            x.zero_()
        x.add_(x)
        x.redistribute(placements=[B])
    return told(seen)


def one_rank_raises(mesh: Any) -> Any:
    """An index out of bounds on one rank, in the write and in its out-of-place form."""
    index = torch.zeros(2, 4, dtype=torch.int64)
    index[0, 1] = 99  # of rank 1
    x, where = place(mesh, S1), place_full(mesh, [S1], index)
    raised = ""
    with watch(x, patience=2.0) as seen:
        try:
            x.scatter_(0, where, 1.0)
        except RuntimeError as error:
            raised = type(error).__name__
        x.add_(1)
    return {"told": told(seen), "raised": raised}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.activate = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.activate(self.up(x)))
        hidden += x
        return hidden


def train(mesh: Any) -> list[float]:
    """A few steps; gives the weights' sums, the gradients' norms and draws of random numbers, to the last bit."""
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block())
    for index in range(2):
        plan = {
            f"{index}.up": ColwiseParallel(use_local_output=False),
            f"{index}.down": RowwiseParallel(use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    numbers = []
    for _ in range(3):
        x = distribute_tensor(torch.randn(4, 8), mesh, [B])
        model(x).pow(2).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [float(norm.full_tensor()), float(torch.rand(()))]
    return numbers + [float(p.full_tensor().double().sum()) for p in model.parameters()]


def training(mesh: Any) -> Any:
    plain = train(mesh)
    with watch() as seen:
        watched = train(mesh)
    return {
        "plain": plain,
        "watched": watched,
        "outcomes": seen.summary()["outcomes"],
        "modules": sorted({one.module for one in seen.records if not one.family}),
        "compared": all(one.compared for one in seen.records if not one.family),
    }


SCENARIOS: dict[str, Callable[[Any], Any]] = {
    function.__name__: function
    for function in (
        known_cases,
        two_axes,
        one_rank_writes,
        another_order,
        one_rank_comes_late,
        one_rank_raises,
        training,
    )
}


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    results = {}
    for name, scenario in SCENARIOS.items():
        results[name] = scenario(mesh)
        dist.barrier()  # whoever is out of step is seen here
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> int:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        if stuck or any(process.exitcode for process in ranks):
            print(f"ranks {stuck} hang; exit codes {[p.exitcode for p in ranks]}", file=sys.stderr)
            return 1
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    print(json.dumps({name: [one[name] for one in found] for name in SCENARIOS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
