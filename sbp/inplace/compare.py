"""Whether an in-place operation gave what its out-of-place form gives under the same placements.

The out-of-place form runs first, on the very arguments, which it only reads; then the in-place one runs for real.
So nothing is copied, an argument that shares memory with the written tensor is no trouble, and autograd sees nothing
of it: a dispatch mode works below it. The generators of random numbers are put back.

Ranks run these things together: see ``agree``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sbp.inplace import tensors
from sbp.inplace.agree import Meeting

_FINE, _REFUSED, _FAILED, _DIFFERS = 0, 1, 2, 3


@dataclass
class Expected:
    """What the written tensors should hold, in the order of the written arguments; None where nobody can tell.

    ``whole`` says that these are full plain tensors instead of distributed ones.
    """

    values: list[Any] | None
    reason: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Opinion:
    """Whether the values are right (None: not known), and a line about it."""

    right: bool | None
    message: str = ""


def is_random(func: Any) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def run_functional(
    functional: Any,
    count: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    meeting: Meeting,
) -> Expected:
    """Run the out-of-place form on the arguments.

    Where it is not supported under these placements, it is run on the full tensors, as one device would.

    Args:
        functional: the overload that writes nothing.
        count: how many tensor arguments the in-place form writes; what it returns for them comes last.
        args, kwargs: the in-place form's arguments without its ``out`` arguments.
        meeting: the ranks that take part.
    """
    with torch.no_grad():
        try:
            values, word, why = functional(*args, **kwargs), _FINE, ""
        except Exception as error:
            values, word, why = None, _REFUSED if tensors.is_refusal(error) else _FAILED, _line(error)
        words = meeting.tell(word)
        if words == {_FINE}:
            return Expected(_last(values, count))
        if len(words) > 1:
            return Expected(None, f"the out-of-place form failed: {why or 'on another rank'}")
        try:
            values, word, why = _run_whole(functional, args, kwargs), _FINE, ""
        except Exception as error:
            values, word, why = None, _FAILED, _line(error)
        if meeting.tell(word) == {_FINE}:
            return Expected(_last(values, count), whole=True)
        return Expected(None, f"the out-of-place form failed: {why or 'on another rank'}")


def judge(expected: Expected, written: Sequence[Any], meeting: Meeting) -> Opinion:
    """Compare what the written tensors hold with what is expected. All ranks of the meeting come to one opinion.

    Args:
        expected: from :func:`run_functional`, with as many values as there are written arguments.
        written: the written arguments after the operation: tensors, lists of tensors, or None.
        meeting: the ranks that take part.
    """
    if meeting.tell(_FINE) != {_FINE}:
        return Opinion(None, "the operation raised on another rank")
    if expected.values is None:
        return Opinion(None, expected.reason)
    pairs = [
        (tensor, value)
        for one, values in zip(written, expected.values, strict=True)
        for tensor, value in zip(_as_list(one), _as_list(values), strict=False)
        if tensors.is_distributed(tensor) and isinstance(value, torch.Tensor)
    ]
    if not pairs:
        return Opinion(None, "the out-of-place form gives nothing to compare with")
    with torch.no_grad():
        try:
            worst = max(_difference(tensor, value, expected.whole, meeting) for tensor, value in pairs)
            word, why = (_FINE if worst <= 1 else _DIFFERS), ""
        except Exception as error:
            worst, word, why = math.nan, _FAILED, _line(error)
        words = meeting.tell(word)
    if _FAILED in words:
        return Opinion(None, f"the results could not be compared: {why or 'on another rank'}")
    if words == {_FINE}:
        return Opinion(True)
    form = "the out-of-place form" + (" on one device" if expected.whole else "")
    return Opinion(False, f"{form} gives another result")


def give_up(meeting: Meeting) -> None:
    """Tell the ranks that wait in :func:`judge` that the operation raised here."""
    meeting.tell(_FAILED)


def _difference(tensor: Any, value: Any, whole: bool, meeting: Meeting) -> float:
    """How far the written tensor is from the expected value, as a multiple of what is tolerated; on this rank."""
    if whole:
        return _distance(tensors.replicated(tensor), value)
    if not tensors.is_distributed(value):
        return _distance(tensors.replicated(tensor), value)
    if tensors.mesh_of(value) != tensors.mesh_of(tensor):
        return math.inf
    if value.dtype != tensor.dtype:
        value = value.to(tensor.dtype)
    same = tensors.placements(value) == tensors.placements(tensor)
    if same:
        distance = _distance(tensor, value)
        # Pieces to be added up may differ although their sums do not.
        if not tensors.has_partial(tensor) or meeting.tell(_FINE if distance <= 1 else _DIFFERS) == {_FINE}:
            return distance
    if not same and not tensors.has_partial(tensor):
        return _distance(tensor, tensors.placed_like(value, tensor))
    if not same and not tensors.has_partial(value):
        return _distance(tensors.placed_like(tensor, value), value)
    return _distance(tensors.replicated(tensor), tensors.replicated(value))


def _distance(found: Any, due: Any) -> float:
    """The larger of the pieces' distances; infinite where a shape differs."""
    ours, theirs = tensors.pieces(found), tensors.pieces(due)
    if len(theirs) == 1 and len(ours) > 1:
        theirs = theirs * len(ours)
    return max(_piece_distance(one, other) for one, other in zip(ours, theirs, strict=True))


def _piece_distance(found: torch.Tensor, due: torch.Tensor) -> float:
    """The L2 norm of the difference over what rounding may explain: ranks add up in another order."""
    if found.shape != due.shape:
        return math.inf
    if due.dtype != found.dtype:
        due = due.to(found.dtype)
    if torch.equal(found, due):
        return 0.0
    if not (found.is_floating_point() or found.is_complex()):
        return math.inf
    same = (found == due) | (found.isnan() & due.isnan())
    wide = torch.complex128 if found.is_complex() else torch.float64
    error = float(torch.linalg.vector_norm((found.to(wide) - due.to(wide)).masked_fill(same, 0)))
    size = float(torch.linalg.vector_norm(due.to(wide).masked_fill(same & ~found.isfinite(), 0)))
    if math.isnan(error):
        return math.inf
    tolerated = min(1e3 * torch.finfo(found.dtype).eps, 0.1) * size
    return math.inf if tolerated == 0 else error / tolerated


def _run_whole(functional: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The out-of-place form on full plain tensors."""

    def gather(value: Any) -> Any:
        if tensors.is_distributed(value):
            return tensors.local(tensors.replicated(value))
        return type(value)(map(gather, value)) if isinstance(value, (list, tuple)) else value

    return functional(*map(gather, args), **{name: gather(value) for name, value in kwargs.items()})


def _last(values: Any, count: int) -> list[Any] | None:
    """The last ``count`` of the values that a function returned."""
    several = (
        list(values) if isinstance(values, tuple) or (isinstance(values, list) and count > 1) else [values]
    )
    return several[len(several) - count :] if len(several) >= count else None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"


class KeepRandomState:
    """Puts the generators of random numbers back as they were: the default one, the device's, and a given one."""

    def __init__(self, device: torch.device, generator: torch.Generator | None) -> None:
        self._device, self._generator = device, generator

    def __enter__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._own = self._generator.get_state() if self._generator is not None else None
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._cpu)
        if self._generator is not None:
            self._generator.set_state(self._own)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
