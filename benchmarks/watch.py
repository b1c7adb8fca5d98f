"""What the watch costs: training steps of a transformer, with and without it, taken in turns in one run.

    python benchmarks/watch.py                # 4 gloo ranks: tensor parallel, sequence parallel norms
    python benchmarks/watch.py --ranks 1      # a world of one rank

Both sides do the same steps on the same model, a few at a time in turns, so that whatever else the machine does hits
both. Prints the median seconds of a step on either side and their ratio, and apart from these the first watched step,
in which the out-of-place form of every write is run for comparison. ``--json`` prints them as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from sbp.inplace import watch


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        batch, length, width = states.shape

        def heads(mixed: torch.Tensor) -> torch.Tensor:
            return mixed.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = (heads(linear(states)) for linear in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1)
        scores *= (width // self.heads) ** -0.5
        mixed = scores.softmax(-1) @ value
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear layers with an in-place ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activate = nn.ReLU(inplace=True)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down(self.activate(self.up(states)))


class Block(nn.Module):
    """A pre-norm block; its second residual is added in place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attention(self.norm1(states))
        hidden = self.mlp(self.norm2(states))
        hidden += states
        return hidden


class Transformer(nn.Module):
    """A stack of blocks."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer(states)
        return states


def parallelise(model: Transformer, mesh: Any) -> None:
    """Attention and MLP tensor parallel, the rest split along the sequence; DTensors from end to end."""
    whole, rows = Replicate(), Shard(1)

    def gather() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole, use_local_output=False)

    for block in model.layers:
        plan: dict[str, Any] = {
            "norm1": SequenceParallel(use_local_output=False),
            "norm2": SequenceParallel(use_local_output=False),
            "attention": gather(),
            "attention.query": ColwiseParallel(use_local_output=False),
            "attention.key": ColwiseParallel(use_local_output=False),
            "attention.value": ColwiseParallel(use_local_output=False),
            "attention.project": RowwiseParallel(output_layouts=rows, use_local_output=False),
            "mlp": gather(),
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(output_layouts=rows, use_local_output=False),
        }
        parallelize_module(block, mesh, plan)


def make_step(options: argparse.Namespace) -> tuple[Callable[[], None], nn.Module]:
    """A training step, and the model that it trains."""
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (options.ranks,))
    model = Transformer(options.width, options.heads, options.layers)
    parallelise(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = distribute_tensor(torch.randn(options.batch, options.length, options.width), mesh, [Shard(1)])

    def step() -> None:
        loss = model(inputs).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def measure(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """One rank's measurement; the first one prints it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks)
    step, model = make_step(options)

    def timed() -> float:
        dist.barrier()
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    for _ in range(3):
        step()
    seen = watch(model)
    with seen:
        first = timed()
    without: list[float] = []
    within: list[float] = []
    for _ in range(options.turns):
        without += [timed() for _ in range(options.steps)]
        with seen:
            within += [timed() for _ in range(options.steps)]
    if rank == 0:
        apart = [statistics.median(times) for times in (without, within)]
        show(
            {
                "ranks": options.ranks,
                "steps": len(within),
                "without": apart[0],
                "watched": apart[1],
                "ratio": apart[1] / apart[0],
                "ratio of the sums, the first watched step among them": (first + sum(within))
                / (statistics.mean(without) * (len(within) + 1)),
                "first watched step": first,
                "writes": seen.summary(),
            },
            options.json,
        )
    dist.destroy_process_group()


def show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6, help="how often the two sides take turns")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (options, f"{folder}/store"), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
