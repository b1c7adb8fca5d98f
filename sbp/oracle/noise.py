"""What rounding explains: references in float64 for results of lower precision, and how far honest ones may be off.

The noise of a quantity is the largest of

- the error of the single-device run in the precision of the trial,
- the change of the float64 result when every input, parameter and cotangent is moved by one epsilon of that precision,
  up or down at random, twice,
- half a unit in the last place of the result's norm.

Both as an L2 norm and as the largest element. An honest run that is cut into pieces adds up in another order and stays
within a few times this; see :data:`sbp.oracle.tolerance.L2_FACTOR`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from sbp.execute import MakeOptimizer
from sbp.oracle.reference import Expected, Reference, compute_reference
from sbp.program import Program, replace_tensors
from sbp.trial import stable_seed

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_PERTURBATIONS = 2
# In float64, a quantity of which so little is left beside the others of the run is what cancelled.
_CANCELLED = 1e-12


def low_reference(
    program: Program,
    case: str,
    dtype: str,
    make_optimizer: MakeOptimizer | None = None,
    seed: int = 0,
    spread: float | None = None,
) -> Reference:
    """The reference of a program in a lower precision: float64 values under the names and dtypes of its own run.

    Args:
        program, case, make_optimizer, seed: see :func:`sbp.oracle.reference.compute_reference`.
        dtype: the precision: the program's, or that of its autocast.
        spread: how much larger than the inputs the pieces are that the inputs are added up from (1 without partial
            ones): their rounding grows with them. None leaves the noise out, for ranks that need only the values.

    Integers and booleans stay as the program's own run has them. So do all values, without noise, where the program
    cannot be run in float64 (because it converts to a lower precision by itself, for instance).
    """
    own = compute_reference(program, case, make_optimizer, seed)
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    truth_program = replace(_widen(program), recipe=replace(program.recipe, autocast=None))
    cotangents = own.cotangents

    def run(changed: Program, moved: Callable[[str, NDArray[np.float64]], NDArray[np.float64]]) -> Reference:
        held = {name: moved(name, value) for name, value in cotangents.items()}
        return compute_reference(changed, case, make_optimizer, seed, held)

    try:
        truth = run(truth_program, lambda name, value: value)
    except Exception:
        return own
    if any(not _fits(own.quantities.get(name), due) for name, due in truth.quantities.items()):
        return own
    if len(truth.quantities) != len(own.quantities):
        return own
    noise = _noise(case, truth, truth_program, run, epsilon * (spread or 1.0)) if spread is not None else {}
    quantities = {}
    for name, rounded in own.quantities.items():
        due = truth.quantities[name]
        if rounded.value is None or due.value is None or rounded.value.dtype.kind not in "fc":
            quantities[name] = rounded
            continue
        l2, largest = noise.get(name, (0.0, 0.0))
        if spread is not None:
            apart = np.abs(rounded.value.astype(due.value.dtype) - due.value)
            apart = np.where(np.isfinite(apart), apart, 0.0)
            half = epsilon / 2
            l2 = max(l2, float(np.linalg.norm(apart)), half * due.norm)
            largest = max(largest, float(apart.max(initial=0.0)), half * _largest(due.value))
            if bool(np.any(~np.isfinite(rounded.value) & np.isfinite(due.value))):
                # Too large for the precision on one device already: nothing can be asked of it.
                l2 = largest = float("inf")
        quantities[name] = replace(due, dtype=rounded.dtype, noise=(l2, largest))
    return Reference(quantities, cotangents)


def with_noise_of_cancelled(
    reference: Reference,
    program: Program,
    case: str,
    make_optimizer: MakeOptimizer | None = None,
    seed: int = 0,
) -> Reference:
    """The float64 reference with the noise of those quantities that all but cancel: what is left of them is rounding,
    and 1e-10 of that would be asked of nobody."""
    norms = {name: due.norm for name, due in reference.quantities.items() if due.dtype == "float64"}
    most = max(norms.values(), default=0.0)
    if not any(0 < norm <= _CANCELLED * most for norm in norms.values()):
        return reference

    def run(changed: Program, moved: Callable[[str, NDArray[np.float64]], NDArray[np.float64]]) -> Reference:
        held = {name: moved(name, value) for name, value in reference.cotangents.items()}
        return compute_reference(changed, case, make_optimizer, seed, held)

    epsilon = float(np.finfo(np.float64).eps)
    noise = _noise(case, reference, program, run, epsilon)
    quantities = {
        name: replace(due, noise=noise[name]) if name in noise and 0 < due.norm <= _CANCELLED * most else due
        for name, due in reference.quantities.items()
    }
    return Reference(quantities, reference.cotangents)


def _noise(
    case: str,
    truth: Reference,
    program: Program,
    run: Callable[..., Reference],
    epsilon: float,
) -> dict[str, tuple[float, float]]:
    """How far each result moves under perturbed inputs: L2 norm and largest element."""
    found: dict[str, tuple[float, float]] = {}
    for number in range(_PERTURBATIONS):

        def factors(name: str, shape: tuple[int, ...], number: int = number) -> NDArray[np.float64]:
            random = np.random.default_rng(stable_seed("perturbation", case, name, str(number)))
            return 1 + epsilon * random.choice(np.array([-1.0, 1.0]), shape)

        def move(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()) or _holds_labels(tensor):
                return _like(tensor, tensor.detach().clone())
            by = torch.from_numpy(np.asarray(factors(name, tuple(tensor.shape)))).to(tensor.device)
            return _like(tensor, (tensor.detach() * by).to(tensor.dtype))

        def moved(name: str, value: NDArray[np.float64]) -> NDArray[np.float64]:
            return value * factors("grad_" + name, value.shape) if value.dtype.kind in "fc" else value

        try:
            other = run(replace_tensors(program, move), moved)
        except (
            Exception
        ):  # a value left the function's domain, or an integer fell on the other side of a step
            continue
        for name, due in truth.quantities.items():
            value = other.quantities[name].value if name in other.quantities else None
            if due.value is None or value is None or value.shape != due.value.shape:
                continue
            if due.value.dtype.kind not in "fc":
                continue
            apart = np.abs(value - due.value)
            apart = np.where(np.isfinite(apart), apart, 0.0)
            before = found.get(name, (0.0, 0.0))
            found[name] = (
                max(before[0], float(np.linalg.norm(apart))),
                max(before[1], float(apart.max(initial=0.0))),
            )
    return found


def _widen(program: Program) -> Program:
    def wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _like(tensor, tensor.detach().clone().to(_WIDE.get(tensor.dtype, tensor.dtype)))

    return replace_tensors(program, wide)


def _holds_labels(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers alone, as labels of 1 and -1 or a mask do: they are told apart by ``==``."""
    values = tensor.detach()
    return bool(torch.equal(values, values.real.round() if values.is_complex() else values.round()))


def _like(tensor: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """``changed`` as a parameter or leaf like ``tensor``."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(changed, requires_grad=tensor.requires_grad)
    return changed.requires_grad_(tensor.requires_grad)


def _fits(own: Expected | None, truth: Expected) -> bool:
    if own is None or (own.value is None) != (truth.value is None):
        return False
    return own.value is None or truth.value is None or own.value.shape == truth.value.shape


def _largest(value: NDArray[np.float64]) -> float:
    magnitudes = np.abs(value)
    return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))
