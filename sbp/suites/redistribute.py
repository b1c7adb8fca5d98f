"""The redistribute suite: a tensor moved from every placement to every other, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from sbp.execute import MakeOptimizer
from sbp.moves import redistribute
from sbp.numbers import draw_normal
from sbp.placement import SBP, B, P, parse_sbp, show
from sbp.plan import PlanOptions, choices_of
from sbp.program import Program
from sbp.trial import Trial, stable_seed

SHAPES = ((8, 4), (6, 5))
AXES = (1, 2)


@dataclass(frozen=True)
class Move:
    """Moves its input to an SBP."""

    to: str

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return redistribute(input, self.to)


def sbps(axes: int, ndim: int) -> list[SBP]:
    """Every SBP of a tensor on a mesh of so many axes."""
    single = [sbp[0] for _, sbp in choices_of(ndim, "f")]
    return list(itertools.product(single, repeat=axes))


class RedistributeSuite:
    """See the module's docstring. A case is a shape and where the tensor goes, a trial adds where it comes from."""

    name = "redistribute"

    def cases(self) -> Iterable[str]:
        for axes in AXES:
            for shape in SHAPES:
                for to in sbps(axes, len(shape)):
                    yield f"{'x'.join(map(str, shape))}->{show(to)}".replace(" ", "")

    def build(self, case: str, dtype: str, device: str) -> Program:
        size, _, to = case.partition("->")
        shape = tuple(map(int, size.split("x")))
        random = np.random.default_rng(stable_seed("values", size))
        values = (
            torch.from_numpy(draw_normal(shape, random)).to(getattr(torch, dtype)).to(torch.device(device))
        )
        return Program(Move(to), (values.requires_grad_(),), names=("input",))

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        return None

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        size, _, text = case.partition("->")
        to = parse_sbp(text)
        for mesh in options.meshes:
            if mesh.ndim != len(to):
                continue
            sources = sbps(mesh.ndim, len(size.split("x")))
            for dtype in options.dtypes:
                for source in sources[: options.rows if options.quick else None]:
                    row = {"input": show(source), "grad_output": show(_gradient(to))}
                    placed = {name: sbp for name, sbp in row.items() if set(parse_sbp(sbp)) != {B}}
                    yield Trial(
                        self.name,
                        case,
                        str(mesh),
                        placed,
                        "forward",
                        {},
                        dtype,
                        options.device,
                        options.subject,
                    )


def _gradient(sbp: SBP) -> SBP:
    """How the gradient of a tensor lies that lies so."""
    return tuple(B if one == P() else one for one in sbp)


SUITE = RedistributeSuite()
