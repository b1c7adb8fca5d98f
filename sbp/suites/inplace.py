"""The in-place suite: augmented assignments, methods with an underscore, ``out=``, ``torch._foreach_*_``,
``inplace=True``, ``nn.init``, ``.data`` and writes through views and indices, over the placements of their operands.

What is compared: the tensor that was written to (and the object that it was before), and in the cases with ``grad`` the
gradients of what it was made from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from sbp.execute import MakeOptimizer
from sbp.numbers import draw_normal, on_grid
from sbp.placement import Mesh
from sbp.plan import PlanOptions, placement_rows
from sbp.program import Program
from sbp.suites.modules import kind_of
from sbp.trial import Trial, stable_seed

SHAPES = ((8, 4), (6, 5))
# A piece of it is larger than what allocators round sizes up to, so that writing past its end shows.
LARGE = (64, 16)
# Values for which every function is defined and no two neighbours of a step meet: see _values.
_OTHERS = {"positive": (0.25, 2.0), "unit": (-0.9, 0.9), "above one": (1.125, 3.0)}


@dataclass(frozen=True)
class Write:
    """One way to write to a tensor.

    Attributes:
        function: called with the tensor and the operands; writes to the tensor, and returns it.
        operands: what else it gets: ``like`` (of the tensor's shape), ``row`` (broadcast along the first dimension),
            ``column``, ``mask``, ``rows`` (indices of rows).
        values: in which range the values lie: ``any``, or one of positive, unit, above one.
        grad: whether a gradient flows through it.
        through: whether it writes through a view or an index. What it returns then is the view, if anything.
        keeps: whether the tensor must keep its placement; not where it is given another's result or data.
    """

    function: Callable[..., Any]
    operands: tuple[str, ...] = ()
    values: str = "any"
    grad: bool = True
    through: bool = False
    keeps: bool = True


def _method(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    def write(target: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        getattr(target, name)(*operands, *args, **kwargs)
        return target

    return write


def _set_row(target: torch.Tensor, row: torch.Tensor) -> None:
    target[1] = row


def _set_column(target: torch.Tensor, other: torch.Tensor) -> None:
    target[:, 1] = other[:, 2]


def _set_number(target: torch.Tensor) -> None:
    target[0] = 0.5


def _add_to_rows(target: torch.Tensor, row: torch.Tensor) -> None:
    target[:2] += row


def _through(write: Callable[..., Any]) -> Callable[..., Any]:
    """Writes through a view; the tensor itself is the result."""

    def then_return(target: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        write(target, *operands)
        return target

    return then_return


def _out(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The ``out=`` form of a torch function, which writes its result to the first tensor."""

    def write(target: torch.Tensor, *operands: torch.Tensor) -> Any:
        return getattr(torch, name)(*operands, *args, out=target, **kwargs)

    return write


def _foreach(name: str, *args: Any) -> Callable[..., Any]:
    """A ``torch._foreach_`` form, on a list of the tensor and a copy of it."""

    def write(target: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        lists = [[operand, operand.clone()] for operand in operands]
        getattr(torch, f"_foreach_{name}")([target, target.clone()], *lists, *args)
        return target

    return write


def _function(name: str, *args: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional with ``inplace=True``."""
    return lambda target: getattr(functional, name)(target, *args, inplace=True)


def _module(name: str) -> Callable[..., Any]:
    """A module of torch.nn with ``inplace=True``."""
    return lambda target: getattr(nn, name)(inplace=True)(target)


def _set_data(target: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    target.data = other
    return target


def _scale_data(target: torch.Tensor) -> torch.Tensor:
    target.data.mul_(1.5)
    return target


WRITES: dict[str, Write] = {
    # x += y and its like bind x to what the operation returns.
    "iadd": Write(operator.iadd, ("like",)),
    "isub": Write(operator.isub, ("like",)),
    "imul": Write(operator.imul, ("like",)),
    "itruediv": Write(operator.itruediv, ("like",), "positive"),
    "ipow": Write(operator.ipow, ("like",), "positive"),
    "ifloordiv": Write(operator.ifloordiv, ("like",), "above one", grad=False),
    "imod": Write(operator.imod, ("like",), "above one", grad=False),
    "iadd_row": Write(operator.iadd, ("row",)),
    "imul_row": Write(operator.imul, ("row",)),
    "imul_column": Write(operator.imul, ("column",)),
    "iadd_number": Write(lambda x: operator.iadd(x, 1.5)),
    "isub_number": Write(lambda x: operator.isub(x, 1.5)),
    "imul_number": Write(lambda x: operator.imul(x, 1.5)),
    "itruediv_number": Write(lambda x: operator.itruediv(x, 1.5)),
    "ipow_number": Write(lambda x: operator.ipow(x, 2)),
    "add_": Write(_method("add_"), ("like",)),
    "sub_": Write(_method("sub_"), ("like",)),
    "mul_": Write(_method("mul_"), ("like",)),
    "div_": Write(_method("div_"), ("like",), "positive"),
    "pow_": Write(_method("pow_"), ("like",), "positive"),
    "copy_": Write(_method("copy_"), ("like",)),
    "copy_row_": Write(_method("copy_"), ("row",)),
    "addcmul_": Write(_method("addcmul_", value=0.5), ("like", "like")),
    "addcdiv_": Write(_method("addcdiv_", value=0.5), ("like", "like"), "positive"),
    "atan2_": Write(_method("atan2_"), ("like",)),
    "fmod_": Write(_method("fmod_"), ("like",), "above one", grad=False),
    "remainder_": Write(_method("remainder_"), ("like",), "above one", grad=False),
    "lerp_": Write(_method("lerp_", 0.25), ("like",)),
    "masked_fill_": Write(_method("masked_fill_", 2.5), ("mask",)),
    "index_add_": Write(lambda x, rows, y: _index(x, "index_add_", rows, y), ("rows", "two rows")),
    "index_copy_": Write(lambda x, rows, y: _index(x, "index_copy_", rows, y), ("rows", "two rows")),
    "index_fill_": Write(lambda x, rows: _index(x, "index_fill_", rows, 2.5), ("rows",)),
    "scatter_": Write(lambda x, where, y: _index(x, "scatter_", where, y), ("places", "like")),
    "scatter_add_": Write(lambda x, where, y: _index(x, "scatter_add_", where, y), ("places", "like")),
    "relu_": Write(_method("relu_")),
    "clamp_": Write(_method("clamp_", -0.5, 0.5)),
    "clamp_min_": Write(_method("clamp_min_", -0.5)),
    "clamp_max_": Write(_method("clamp_max_", 0.5)),
    "clip_": Write(_method("clip_", -0.5, 0.5)),
    "sin_": Write(_method("sin_")),
    "cos_": Write(_method("cos_")),
    "exp_": Write(_method("exp_")),
    "log_": Write(_method("log_"), values="positive"),
    "sqrt_": Write(_method("sqrt_"), values="positive"),
    "rsqrt_": Write(_method("rsqrt_"), values="positive"),
    "reciprocal_": Write(_method("reciprocal_"), values="positive"),
    "square_": Write(_method("square_")),
    "neg_": Write(_method("neg_")),
    "abs_": Write(_method("abs_")),
    "sign_": Write(_method("sign_"), grad=False),
    "floor_": Write(_method("floor_"), grad=False),
    "ceil_": Write(_method("ceil_"), grad=False),
    "round_": Write(_method("round_"), grad=False),
    "trunc_": Write(_method("trunc_"), grad=False),
    "sigmoid_": Write(_method("sigmoid_")),
    "tanh_": Write(_method("tanh_")),
    "erf_": Write(_method("erf_")),
    "erfinv_": Write(_method("erfinv_"), values="unit"),
    "triu_": Write(_method("triu_")),
    "tril_": Write(_method("tril_")),
    "cumsum_": Write(_method("cumsum_", 0)),
    "zero_": Write(_method("zero_")),
    "fill_": Write(_method("fill_", 2.5)),
    # The out= forms: the tensor is written to, and what it held is not looked at.
    "add(out=)": Write(_out("add"), ("like", "like"), grad=False, keeps=False),
    "mul(out=)": Write(_out("mul"), ("like", "like"), grad=False, keeps=False),
    "div(out=)": Write(_out("div"), ("like", "like"), "positive", grad=False, keeps=False),
    "exp(out=)": Write(_out("exp"), ("like",), grad=False, keeps=False),
    "neg(out=)": Write(_out("neg"), ("like",), grad=False, keeps=False),
    "clamp(out=)": Write(_out("clamp", -0.5, 0.5), ("like",), grad=False, keeps=False),
    "maximum(out=)": Write(_out("maximum"), ("like", "like"), grad=False, keeps=False),
    "cumsum(out=)": Write(_out("cumsum", 0), ("like",), grad=False, keeps=False),
    "foreach_add_": Write(_foreach("add_"), ("like",), grad=False),
    "foreach_add_number_": Write(_foreach("add_", 1.5), grad=False),
    "foreach_mul_": Write(_foreach("mul_"), ("like",), grad=False),
    "foreach_div_": Write(_foreach("div_"), ("like",), "positive", grad=False),
    "foreach_addcmul_": Write(_foreach("addcmul_", 0.5), ("like", "like"), grad=False),
    "foreach_lerp_": Write(_foreach("lerp_", 0.25), ("like",), grad=False),
    "foreach_copy_": Write(_foreach("copy_"), ("like",), grad=False),
    "foreach_sqrt_": Write(_foreach("sqrt_"), values="positive", grad=False),
    "foreach_neg_": Write(_foreach("neg_"), grad=False),
    "foreach_zero_": Write(_foreach("zero_"), grad=False),
    "foreach_clamp_max_": Write(_foreach("clamp_max_", 0.5), grad=False),
    "relu(inplace)": Write(_function("relu")),
    "leaky_relu(inplace)": Write(_function("leaky_relu")),
    "elu(inplace)": Write(_function("elu")),
    "selu(inplace)": Write(_function("selu")),
    "celu(inplace)": Write(_function("celu")),
    "silu(inplace)": Write(_function("silu")),
    "mish(inplace)": Write(_function("mish")),
    "relu6(inplace)": Write(_function("relu6")),
    "hardtanh(inplace)": Write(_function("hardtanh")),
    "hardswish(inplace)": Write(_function("hardswish")),
    "hardsigmoid(inplace)": Write(_function("hardsigmoid")),
    "threshold(inplace)": Write(_function("threshold", 0.1, 0.5)),
    "ReLU(inplace)": Write(_module("ReLU")),
    "SiLU(inplace)": Write(_module("SiLU")),
    "Hardtanh(inplace)": Write(_module("Hardtanh")),
    "init.ones_": Write(nn.init.ones_, grad=False),
    "init.zeros_": Write(nn.init.zeros_, grad=False),
    "init.constant_": Write(lambda x: nn.init.constant_(x, 2.5), grad=False),
    "init.eye_": Write(nn.init.eye_, grad=False),
    ".data =": Write(_set_data, ("like",), grad=False, keeps=False),
    ".data.mul_": Write(_scale_data, grad=False, through=True),
    "detach().mul_": Write(lambda x: x.detach().mul_(1.5), grad=False, through=True),
    "t().mul_": Write(lambda x, y: x.t().mul_(y.t()), ("like",), through=True),
    "view.mul_": Write(lambda x: x.view(-1).mul_(1.5), through=True),
    "slice.zero_": Write(lambda x: x[:2].zero_(), through=True),
    "slice.mul_": Write(lambda x: x[:, 1:3].mul_(1.5), through=True),
    "select.zero_": Write(lambda x: x.select(0, 3).zero_(), through=True),
    "slice.iadd": Write(_add_to_rows, ("row",), through=True),
    "setitem_row": Write(_set_row, ("row",), through=True),
    "setitem_column": Write(_set_column, ("like",), through=True),
    "setitem_number": Write(_set_number, through=True),
}


def _index(target: torch.Tensor, name: str, *args: Any) -> torch.Tensor:
    getattr(target, name)(0, *args)
    return target


@dataclass(frozen=True)
class _WithoutGradient:
    write: Callable[..., Any]

    def __call__(self, input: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        return self.write(input, *operands)


@dataclass(frozen=True)
class _WithGradient:
    write: Callable[..., Any]

    def __call__(self, input: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        return self.write(input.clone(), *operands)


class InplaceSuite:
    """See the module's docstring."""

    name = "inplace"

    def cases(self) -> Iterable[str]:
        for name, write in WRITES.items():
            for shape in SHAPES:
                yield f"{name}:{shape[0]}x{shape[1]}"
            if write.grad:
                yield f"{name}:{LARGE[0]}x{LARGE[1]}:grad"

    def build(self, case: str, dtype: str, device: str) -> Program:
        name, size, *grad = case.split(":")
        write = WRITES[name]
        rows, columns = map(int, size.split("x"))
        random = np.random.default_rng(stable_seed("values", case))
        wanted, where = getattr(torch, dtype), torch.device(device)
        operands = [_operand(kind, (rows, columns), write.values, random) for kind in write.operands]
        tensors = [_values((rows, columns), write.values, random), *operands]
        placed = [
            tensor.to(wanted).to(where).requires_grad_(bool(grad))
            if tensor.is_floating_point()
            else tensor.to(where)
            for tensor in tensors
        ]
        names = ("input", "other", "other_2")[: len(placed)]
        if grad:
            function = _through(write.function) if write.through else write.function
            return Program(_WithGradient(function), tuple(placed), names=names)
        return Program(
            _WithoutGradient(write.function),
            tuple(placed),
            names=names,
            writes=("input",),
            keeps_placement=write.keeps,
        )

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        return None

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        program = self.build(case, "float64", "cpu")
        tensors = {name: (tensor.ndim, kind_of(tensor)) for name, tensor in program.inputs().items()}
        for mesh in options.meshes:
            for dtype in options.dtypes:
                for row in _rows(tensors, mesh, options):
                    yield Trial(
                        self.name, case, str(mesh), row, "forward", {}, dtype, options.device, options.subject
                    )


def _rows(tensors: dict[str, tuple[int, str]], mesh: Mesh, options: PlanOptions) -> list[dict[str, str]]:
    """All placements where each tensor has a few choices, or at the full level."""
    most = options.rows if mesh.ndim > 1 or options.quick else None
    every = 1024 if options.rows is None else 64
    fixed = {name: sbp for name, sbp in (options.placements or {}).items() if name in tensors}
    rows, _ = placement_rows(tensors, mesh, every, options.partial, fixed, most=most)
    return rows


def _values(shape: tuple[int, ...], values: str, random: np.random.Generator) -> torch.Tensor:
    if values == "any":
        return torch.from_numpy(draw_normal(shape, random))
    return torch.from_numpy(on_grid(random.uniform(*_OTHERS[values], shape)))


def _operand(kind: str, shape: tuple[int, int], values: str, random: np.random.Generator) -> torch.Tensor:
    rows, columns = shape
    if kind == "mask":
        return torch.from_numpy(random.integers(0, 2, shape).astype(bool))
    if kind == "rows":
        return torch.tensor([1, rows - 1])
    if kind == "places":
        # Each place once, so that the order in which they are written does not matter.
        return torch.from_numpy(np.stack([random.permutation(rows) for _ in range(columns)], axis=1))
    sizes = {"like": shape, "row": (columns,), "column": (rows, 1), "two rows": (2, columns)}
    return _values(sizes[kind], values, random)


SUITE = InplaceSuite()
