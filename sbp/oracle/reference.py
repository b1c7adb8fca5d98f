"""What the program computes on one device, without any distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sbp.execute import MakeOptimizer, Quantity, execute
from sbp.numbers import draw_normal
from sbp.program import Program, replace_tensors, to_numpy
from sbp.trial import stable_seed


@dataclass(frozen=True)
class Expected:
    """One quantity as the reference has it; ``value`` is None where it has none (no gradient). ``noise`` is what
    rounding explains, as an L2 norm and as the largest element; zeros where it is not known. See sbp.oracle.noise."""

    kind: str
    value: NDArray[Any] | None
    dtype: str
    norm: float
    noise: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Reference:
    """The single-device results by name, and the cotangents that they were made with."""

    quantities: Mapping[str, Expected]
    cotangents: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def draw_cotangent(case: str, name: str, like: torch.Tensor) -> torch.Tensor:
    """The random cotangent of the output ``name``, of its shape and dtype; the same on every call."""
    random = np.random.default_rng(stable_seed("cotangent", case, name))
    values = torch.from_numpy(draw_normal(like.shape, random))
    if like.is_complex():
        values = torch.complex(values, torch.from_numpy(draw_normal(like.shape, random)))
    return values.to(like.dtype).to(like.device)


def compute_reference(
    program: Program,
    case: str,
    make_optimizer: MakeOptimizer | None = None,
    seed: int = 0,
    given: Mapping[str, NDArray[Any]] | None = None,
) -> Reference:
    """Run a copy of ``program`` on one device and keep every result.

    Args:
        program: left as it is.
        case: the case's name; the cotangents depend on it.
        make_optimizer: for a training trial.
        seed: torch's generator is set to it first.
        given: cotangents by output, instead of drawn ones.
    """
    quantities: dict[str, Expected] = {}
    cotangents: dict[str, NDArray[Any]] = {}

    def observe(quantity: Quantity, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            quantities[quantity.name] = Expected(quantity.kind, None, "", 0.0)
            return
        value = to_numpy(tensor)
        quantities[quantity.name] = Expected(
            quantity.kind, value, str(tensor.dtype).removeprefix("torch."), norm_of(value)
        )

    def make_cotangent(name: str, output: torch.Tensor) -> torch.Tensor:
        if given is not None:
            cotangent = torch.from_numpy(np.array(given[name])).to(output.dtype).to(output.device)
        else:
            cotangent = draw_cotangent(case, name, output)
        cotangents[name] = to_numpy(cotangent)
        return cotangent

    torch.manual_seed(seed)
    execute(copy_program(program), make_cotangent, observe, make_optimizer)
    return Reference(quantities, cotangents)


def norm_of(value: NDArray[Any]) -> float:
    """The L2 norm of the finite elements."""
    if value.dtype.kind == "b":
        return float(np.sqrt(np.count_nonzero(value)))
    wide = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
    return float(np.linalg.norm(wide[np.isfinite(wide)]))


def copy_program(program: Program) -> Program:
    """A copy with tensors of its own; leaves stay leaves and parameters parameters."""

    def copy_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
        clone = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(clone, requires_grad=tensor.requires_grad)
        return clone.requires_grad_(tensor.requires_grad)

    return replace_tensors(program, copy_tensor)
