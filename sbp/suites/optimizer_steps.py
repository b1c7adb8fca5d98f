"""The optimizers suite: training steps with every optimizer, over the placements of a module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from sbp.execute import MakeOptimizer
from sbp.numbers import draw_normal
from sbp.plan import PlanOptions, placement_rows
from sbp.program import Program
from sbp.suites.modules import kind_of, prepare
from sbp.trial import Trial, stable_seed

# Fractions of powers of two: exact in float32 too, which is what some frameworks keep these numbers in.
_RATE = 2.0**-6
_BETAS = (0.875, 1 - 2.0**-8)
_EPS = 2.0**-13

OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=_RATE),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=_RATE, momentum=0.875),
    "SGD-nesterov": lambda p: torch.optim.SGD(p, lr=_RATE, momentum=0.875, weight_decay=_RATE, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=_RATE, betas=_BETAS, eps=_EPS),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, lr=_RATE, betas=_BETAS, eps=_EPS, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=_RATE, betas=_BETAS, eps=_EPS, weight_decay=0.125),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=_RATE, alpha=0.875, eps=_EPS),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=_RATE, eps=_EPS),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.875, eps=_EPS),
}
_MODULES: dict[str, Callable[[], tuple[torch.nn.Module, tuple[int, ...]]]] = {
    "Linear(8,12)": lambda: (torch.nn.Linear(8, 12), (4, 8)),
    "LayerNorm(8)": lambda: (torch.nn.LayerNorm(8), (4, 8)),
}


class OptimizerSuite:
    """See the module's docstring. A case is a module, a trial adds the optimizer and the placements."""

    name = "optimizers"

    def cases(self) -> Iterable[str]:
        return list(_MODULES)

    def build(self, case: str, dtype: str, device: str) -> Program:
        torch.manual_seed(stable_seed("build", case) % 2**31)
        module, shape = _MODULES[case]()
        random = np.random.default_rng(stable_seed("input", case))
        input = torch.from_numpy(draw_normal(shape, random)).requires_grad_()
        return prepare(Program(module, (input,)), case, getattr(torch, dtype), torch.device(device))

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        make = OPTIMIZERS[trial.options["optimizer"]]
        return lambda named: make([parameter for _, parameter in named])

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        program = self.build(case, "float64", "cpu")
        tensors = {name: (tensor.ndim, kind_of(tensor)) for name, tensor in program.parameters().items()}
        for mesh in options.meshes:
            rows, _ = placement_rows(tensors, mesh, 16, options.partial, options.placements, options.rows)
            for dtype in options.dtypes:
                for optimizer in OPTIMIZERS:
                    for row in rows:
                        chosen = {"optimizer": optimizer}
                        yield Trial(
                            self.name,
                            case,
                            str(mesh),
                            row,
                            "train",
                            chosen,
                            dtype,
                            options.device,
                            options.subject,
                        )


SUITE = OptimizerSuite()
