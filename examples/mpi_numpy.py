"""Code without torch: mpi4py and numpy, forward and backward by hand.

python -m sbp.run -n 4 examples/mpi_numpy.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from sbp import World, case


class RowParallelLinear:
    """Some of the input features on each rank, cut as numpy.array_split does; the results are summed."""

    weight: np.ndarray
    bias: np.ndarray

    def __init__(self, world: World) -> None:
        self.comm = world.comm()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.x = x
        part = x @ self.weight.T
        total = np.empty_like(part)
        self.comm.Allreduce(part, total)
        return total + self.bias

    def backward(self, gradient: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "input": gradient @ self.weight,
            "weight": gradient.T @ self.x,
            "bias": gradient.sum(0),
        }


RowParallelLinear.weight = RowParallelLinear.bias = None  # set by whoever loads it


@case(
    spmd=lambda module, world: RowParallelLinear(world),
    numpy=True,
    placements={"input": "S(1, balanced)", "weight": "S(1, balanced)"},
)
def linear():
    return nn.Linear(9, 6), torch.randn(4, 9, requires_grad=True)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def parallel_softmax(function, world: World):
    """A row-wise softmax whose rows are split over the ranks."""
    from mpi4py import MPI

    comm = world.comm()

    def run(x: np.ndarray) -> np.ndarray:
        largest = np.empty(x.shape[:-1])
        comm.Allreduce(x.max(-1, initial=-np.inf), largest, op=MPI.MAX)
        powers = np.exp(x - largest[..., None])
        total = np.empty_like(largest)
        comm.Allreduce(powers.sum(-1), total)
        return powers / total[..., None]

    return run


@case(
    spmd=parallel_softmax,
    numpy=True,
    gradients=False,
    placements={"x": "S(1, balanced)", "output": "S(1, balanced)"},
)
def softmax_of_split_rows():
    return softmax, torch.randn(3, 10)
