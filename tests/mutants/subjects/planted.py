"""What a planted fault is, and the collectives in which most of them sit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sbp import Case, World

RIGHT = "none"


@dataclass(frozen=True)
class Mutant:
    """A correct case and the same one with a fault.

    Attributes:
        kind: what sort of fault it is, one of ``tests.mutants.kinds.KINDS``.
        quantity: what has to be named first: the result nearest to the fault.
        dtype: in which the trial runs.
        explained: whether its error is within what rounding explains, so that it cannot be told from honest code.
    """

    kind: str
    quantity: str
    right: Case
    planted: Case
    dtype: str = "float64"
    explained: bool = False


@dataclass
class Planted:
    """The faults of one file, and the correct cases that they were planted in."""

    mutants: list[Mutant] = field(default_factory=list)
    right: list[tuple[Case, str]] = field(default_factory=list)

    def plant(
        self,
        make: Callable[[str], Case],
        faults: dict[str, tuple[str, str]],
        dtype: str = "float64",
        explained: bool = False,
    ) -> None:
        """``make(fault)`` is the case with that fault, ``make("none")`` the correct one; ``faults`` says of each its
        kind and quantity."""
        right = make(RIGHT)
        self.right.append((right, dtype))
        for fault, (kind, quantity) in faults.items():
            self.mutants.append(Mutant(kind, quantity, right, make(fault), dtype, explained))

    def cases(self) -> Iterator[Case]:
        yield from (case for case, _ in self.right)
        yield from (mutant.planted for mutant in self.mutants)


def reduce(x: torch.Tensor, how: str, world: World, axis: str | int = 0) -> torch.Tensor:
    """The sum over the ranks, or what ``how`` makes of it."""
    group, size = world.group(axis), world.size_of(axis)
    total = x.detach().contiguous().clone()
    if how == "missing":
        return total
    if how == "half":
        pieces = [torch.empty_like(total) for _ in range(size)]
        dist.all_gather(pieces, total, group=group)
        first = world.rank_in(axis) // 2 * 2
        return pieces[first] + pieces[first + 1]
    dist.all_reduce(total, dist.ReduceOp.MAX if how == "maximum" else dist.ReduceOp.SUM, group)
    if how == "doubled":
        dist.all_reduce(total, group=group)
    return total / size if how == "mean" else total


class Reduce(torch.autograd.Function):
    """All-reduce forward and backward, each as its word says; ``no`` passes on."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: str, backward: str, world: World, axis: str | int
    ) -> torch.Tensor:
        ctx.how, ctx.world, ctx.axis = backward, world, axis
        return x.view_as(x) if forward == "no" else reduce(x, forward, world, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.how != "no":
            gradient = reduce(gradient, ctx.how, ctx.world, ctx.axis)
        return gradient, None, None, None, None


def copy_to_ranks(x: torch.Tensor, world: World, backward: str = "sum", axis: str | int = 0) -> torch.Tensor:
    """The same tensor on every rank, each of which has a part of its gradient."""
    return Reduce.apply(x, "no", backward, world, axis)


def sum_over_ranks(x: torch.Tensor, world: World, forward: str = "sum", axis: str | int = 0) -> torch.Tensor:
    """The sum of the ranks' parts, each of which has the whole gradient."""
    return Reduce.apply(x, forward, "no", world, axis)


def share_over_ranks(
    x: torch.Tensor, world: World, forward: str = "sum", backward: str = "sum"
) -> torch.Tensor:
    """The sum of the ranks' parts, used by each rank in another way: gradients add up as well."""
    return Reduce.apply(x, forward, backward, world, 0)


def sum_gradients(module: torch.nn.Module) -> None:
    """What hand-written data or sequence parallel code does after the backward pass."""
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
