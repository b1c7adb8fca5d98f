"""The functions suite: well-known functions of tensors, forward and backward, over the placements of their inputs.

Small and readable, for subjects that have not all of torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sbp.execute import MakeOptimizer
from sbp.numbers import draw_normal, on_grid
from sbp.plan import PlanOptions, placement_rows
from sbp.program import Program
from sbp.suites.modules import kind_of
from sbp.trial import Trial, stable_seed

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """A function and the shapes of its inputs, whose sizes divide a mesh of 2 or 4 in the first set of shapes and not
    in the second.

    Attributes:
        call: the function.
        shapes: of the inputs, once for each case.
        positive: whether the inputs are positive numbers.
    """

    call: Callable[..., Any]
    shapes: tuple[tuple[Shape, ...], ...] = (((8, 4),), ((6, 5),))
    positive: bool = False


_TWO = (((8, 4), (8, 4)), ((6, 5), (6, 5)))
_ONE_3D = (((4, 8, 4),), ((5, 6, 7),))

FUNCTIONS: dict[str, Function] = {
    "add": Function(torch.add, _TWO),
    "sub": Function(torch.sub, _TWO),
    "mul": Function(torch.mul, _TWO),
    "div": Function(torch.div, _TWO, positive=True),
    "pow": Function(torch.pow, _TWO, positive=True),
    "maximum": Function(torch.maximum, _TWO),
    "add_row": Function(torch.add, (((8, 4), (4,)), ((6, 5), (5,)))),
    "add_number": Function(lambda x: x + 1.5),
    "mul_number": Function(lambda x: x * 1.5),
    "neg": Function(torch.neg),
    "abs": Function(torch.abs),
    "exp": Function(torch.exp),
    "log": Function(torch.log, positive=True),
    "sqrt": Function(torch.sqrt, positive=True),
    "sin": Function(torch.sin),
    "tanh": Function(torch.tanh),
    "clamp": Function(lambda x: torch.clamp(x, -0.5, 0.5)),
    "relu": Function(torch.relu),
    "gelu": Function(lambda x: F.gelu(x)),
    "sigmoid": Function(torch.sigmoid),
    "matmul": Function(torch.matmul, (((8, 4), (4, 8)), ((6, 5), (5, 7)))),
    "bmm": Function(torch.bmm, (((4, 8, 4), (4, 4, 8)), ((5, 6, 7), (5, 7, 6)))),
    "linear": Function(lambda x, w, b: F.linear(x, w, b), (((8, 4), (8, 4), (8,)), ((6, 5), (7, 5), (7,)))),
    "sum": Function(torch.sum),
    "sum(dim)": Function(lambda x: x.sum(1)),
    "mean": Function(torch.mean),
    "mean(dim)": Function(lambda x: x.mean(0)),
    "max": Function(torch.max),
    "max(dim)": Function(lambda x: x.max(1)),
    "min(dim)": Function(lambda x: x.min(0)),
    "argmax": Function(lambda x: x.argmax(1)),
    "prod(dim)": Function(lambda x: x.prod(1)),
    "var(dim)": Function(lambda x: x.var(1)),
    "std": Function(lambda x: x.std(0)),
    "cumsum": Function(lambda x: torch.cumsum(x, 1)),
    "softmax": Function(lambda x: torch.softmax(x, 1)),
    "log_softmax": Function(lambda x: torch.log_softmax(x, 1)),
    "logsumexp": Function(lambda x: torch.logsumexp(x, 1)),
    "layer_norm": Function(
        lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
        (((8, 4, 4), (4,), (4,)), ((6, 3, 5), (5,), (5,))),
    ),
    "normalize": Function(lambda x: F.normalize(x)),
    "transpose": Function(lambda x: torch.transpose(x, 0, 1)),
    "permute": Function(lambda x: torch.permute(x, (2, 0, 1)), _ONE_3D),
    "reshape": Function(lambda x: torch.reshape(x, (x.shape[0] * x.shape[1],))),
    "flatten": Function(lambda x: torch.flatten(x, 1), _ONE_3D),
    "unsqueeze": Function(lambda x: torch.unsqueeze(x, 1)),
    "cat": Function(lambda x, y: torch.cat([x, y], 0), _TWO),
    "stack": Function(lambda x, y: torch.stack([x, y], 1), _TWO),
    "chunk": Function(lambda x: torch.chunk(x, 2, 1)),
    "slice": Function(lambda x: x[1:3]),
    "index": Function(lambda x: x[2]),
    "flip": Function(lambda x: torch.flip(x, [0])),
    "roll": Function(lambda x: torch.roll(x, 1, 0)),
    "tril": Function(torch.tril),
    "where": Function(lambda x, y: torch.where(x > y, x, y), _TWO),
    "sort": Function(lambda x: torch.sort(x, 1)),
    "topk": Function(lambda x: torch.topk(x, 2, 1)),
    "expand": Function(lambda x: x.unsqueeze(0).expand(3, *x.shape)),
    "repeat": Function(lambda x: x.repeat(2, 1)),
    "tile": Function(lambda x: torch.tile(x, (2, 1))),
    "einsum": Function(lambda x, y: torch.einsum("ik,kj->ij", x, y), (((8, 4), (4, 8)), ((6, 5), (5, 7)))),
    "norm": Function(torch.norm),
    "mse_loss": Function(lambda x, y: F.mse_loss(x, y), _TWO),
    "dot": Function(torch.dot, (((8,), (8,)), ((6,), (6,)))),
}


class FunctionSuite:
    """See the module's docstring."""

    name = "functions"

    def cases(self) -> Iterable[str]:
        for name, function in FUNCTIONS.items():
            for shapes in function.shapes:
                yield f"{name}:{','.join('x'.join(map(str, shape)) for shape in shapes)}"

    def build(self, case: str, dtype: str, device: str) -> Program:
        name, _, sizes = case.partition(":")
        function = FUNCTIONS[name]
        shapes = [tuple(map(int, size.split("x"))) for size in sizes.split(",")]
        random = np.random.default_rng(stable_seed("values", case))
        values = [
            on_grid(random.uniform(0.25, 2.0, shape)) if function.positive else draw_normal(shape, random)
            for shape in shapes
        ]
        tensors = [
            torch.from_numpy(each).to(getattr(torch, dtype)).to(torch.device(device)).requires_grad_()
            for each in values
        ]
        names = ("input", "other", "other_2")[: len(tensors)]
        return Program(function.call, tuple(tensors), names=names)

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        return None

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        program = self.build(case, "float64", "cpu")
        tensors = {name: (tensor.ndim, kind_of(tensor)) for name, tensor in program.inputs().items()}
        fixed = {name: sbp for name, sbp in (options.placements or {}).items() if name in tensors}
        for mesh in options.meshes:
            every = options.full_product_up_to if options.rows is not None else 256
            most = options.rows if mesh.ndim > 1 or options.quick else None
            rows, _ = placement_rows(tensors, mesh, every, options.partial, fixed, most=most)
            for dtype in options.dtypes:
                for row in rows:
                    yield Trial(
                        self.name, case, str(mesh), row, "forward", {}, dtype, options.device, options.subject
                    )


SUITE = FunctionSuite()
