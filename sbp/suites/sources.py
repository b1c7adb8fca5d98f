"""The sources suite: tensors that are made as global ones, dropout, and collectives in another order on one rank.

Random results are judged by what they promise whatever is drawn: replicas agree, different parts differ, a permutation
is one, moments are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sbp.execute import MakeOptimizer
from sbp.moves import create, in_any_order, redistribute
from sbp.numbers import draw_normal
from sbp.placement import parse_sbp, show
from sbp.plan import PlanOptions, choices_of
from sbp.program import Program
from sbp.suites.redistribute import sbps
from sbp.trial import Trial, stable_seed


@dataclass(frozen=True)
class Source:
    """A function of torch that makes a tensor.

    Attributes:
        name, args: of the function.
        dtype: what is made; None for the trial's.
        shape: of the result.
        promise: what the result keeps if it is random.
    """

    name: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str | None = None
    promise: str = ""


SOURCES: dict[str, Source] = {
    "zeros(8,4)": Source("zeros", (8, 4), (8, 4)),
    "ones(8,4)": Source("ones", (8, 4), (8, 4)),
    "ones(6,5)": Source("ones", (6, 5), (6, 5)),
    "full(8,4)": Source("full", ((8, 4), 2.5), (8, 4)),
    "arange(12)": Source("arange", (12,), (12,), "int64"),
    "arange(1,8.5,0.5)": Source("arange", (1.0, 8.5, 0.5), (15,)),
    "linspace(0,1,12)": Source("linspace", (0.0, 1.0, 12), (12,)),
    "eye(8)": Source("eye", (8,), (8, 8)),
    "randperm(0)": Source("randperm", (0,), (0,), "int64", "permutation"),
    "randperm(64)": Source("randperm", (64,), (64,), "int64", "permutation"),
    "randperm(61)": Source("randperm", (61,), (61,), "int64", "permutation"),
    "rand(64,64)": Source("rand", (64, 64), (64, 64), None, "uniform"),
    "randn(64,64)": Source("randn", (64, 64), (64, 64), None, "normal"),
}


@dataclass(frozen=True)
class Make:
    source: Source
    dtype: str
    to: str

    def __call__(self) -> torch.Tensor:
        return create(self.source.name, self.source.args, self.dtype, self.to)


@dataclass(frozen=True)
class Both:
    """Two moves that do not depend on each other."""

    to: str

    def __call__(self, input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, two = in_any_order(lambda: redistribute(input, self.to), lambda: redistribute(other, self.to))
        return one, two


def _functional_dropout(input: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(input, 0.5)


DROPOUTS: dict[str, Callable[[], Callable[..., Any]]] = {
    "Dropout(0.5)": lambda: torch.nn.Dropout(0.5),
    "functional.dropout": lambda: _functional_dropout,
}
_DROPPED = (64, 64)
_ORDER = "two moves"


class SourcesSuite:
    """See the module's docstring."""

    name = "sources"

    def cases(self) -> Iterable[str]:
        for name, source in SOURCES.items():
            for axes in (1, 2):
                for to in sbps(axes, len(source.shape)):
                    yield f"{name}->{show(to)}".replace(" ", "")
        yield from DROPOUTS
        yield from (f"{_ORDER}->{to}" for to in ("B", "S(1)"))

    def build(self, case: str, dtype: str, device: str) -> Program:
        wanted, where = getattr(torch, dtype), torch.device(device)
        if case in DROPOUTS:
            ones = torch.ones(_DROPPED, dtype=wanted, device=where)
            return Program(DROPOUTS[case](), (ones,), random=True, promise="either 0 or 2")
        name, _, to = case.partition("->")
        if name == _ORDER:
            random = np.random.default_rng(stable_seed("values", case))
            both = [torch.from_numpy(draw_normal((8, 4), random)).to(wanted).to(where) for _ in range(2)]
            return Program(Both(to), tuple(both), names=("input", "other"))
        source = SOURCES[name]
        made = Make(source, source.dtype or dtype, to)
        return Program(made, random=bool(source.promise), promise=source.promise)

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        return None

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        to = case.partition("->")[2]
        for mesh in options.meshes:
            for placed, chosen in self._rows(case, mesh.ndim):
                if to and len(parse_sbp(to)) != mesh.ndim:
                    continue
                for dtype in options.dtypes:
                    yield Trial(
                        self.name,
                        case,
                        str(mesh),
                        placed,
                        "forward",
                        chosen,
                        dtype,
                        options.device,
                        options.subject,
                    )

    def _rows(self, case: str, axes: int) -> Iterable[tuple[dict[str, str], dict[str, Any]]]:
        if case in DROPOUTS:
            for sbp in sbps(axes, len(_DROPPED)):
                yield {"input": show(sbp)}, {}
                # Ranks that did not agree on a seed beforehand.
                yield {"input": show(sbp)}, {"unseeded": True}
        elif case.startswith(_ORDER):
            for text, _ in choices_of(2, "f"):
                yield {"input": text, "other": text}, {"reversed_on": 2}
        else:
            yield {}, {}


SUITE = SourcesSuite()
