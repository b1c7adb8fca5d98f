"""Which SBP signatures are true for an operator, found out by experiment.

A signature such as ``S(0), B -> S(0)`` claims: cut the inputs so, run the operator on each rank's pieces alone, and
the results are the pieces of the true result under the output's placement. Whether that holds is tried out with the
operator itself on one device and the meaning of a placement (``sbp.placement``), with nothing of any framework's
rules. All ranks' pieces are run one after another in this process.

An experiment can refute a signature, never prove one. So each is tried on several draws that are built to break
accidents: fresh random values of both signs, partial pieces that resemble nothing, meshes of 2, 3 and 4 ranks, so
that most sizes do not divide. One counter-example removes it for good. What is left is called true, with the number
of draws that it withstood.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sbp.numbers import on_grid
from sbp.placement import Array, B, LayoutError, Mesh, P, Placement, S, combine, local_shape, split
from sbp.program import to_numpy
from sbp.trees import map_tensors, named_tensors
from sbp.trial import stable_seed

MESH_SIZES = (2, 3, 4)
# Combinations of input placements that are tried at most for one call; further ones are said to be left out.
MOST_COMBINATIONS = 400
# A result counts as equal when the difference is below this part of the largest magnitude in it (float64).
_TOLERANCE = 1e-9
_PARTIAL_RESULTS = ("sum", "avg", "max", "min")


@dataclass(frozen=True)
class Signature:
    """One true signature of one output.

    Attributes:
        inputs: the placement of each input tensor, in the order of :attr:`Judged.inputs`.
        output: the output's placement.
        draws: how many draws it withstood.
    """

    inputs: tuple[str, ...]
    output: str
    draws: int

    def __str__(self) -> str:
        return f"{', '.join(self.inputs)} -> {self.output}"


@dataclass(frozen=True)
class Judged:
    """What was found out about one kind of call of an operator.

    Attributes:
        call: the kind: the arguments that are no tensors, and each tensor's number of dimensions.
        inputs: the names of the input tensors.
        outputs: output name -> its true signatures.
        tested: how many pairs of input placements and output placement were judged.
        draws: how many draws there were in all.
        left_out: combinations of input placements that were not tried.
        raised: input placements under which the local operator raised on a piece that was not empty, with the error.
    """

    call: str
    inputs: tuple[str, ...]
    outputs: dict[str, list[Signature]]
    tested: int
    draws: int
    left_out: int = 0
    raised: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As the table's file has it. Errors that the local operator raised are left out: they fill pages."""
        return {
            "call": self.call,
            "inputs": list(self.inputs),
            "outputs": {
                name: [[list(one.inputs), one.output, one.draws] for one in signatures]
                for name, signatures in self.outputs.items()
            },
            "tested": self.tested,
            "draws": self.draws,
            "left_out": self.left_out,
        }


def follows_from_broadcast(signature: Signature, all_of_it: Sequence[Signature]) -> bool:
    """Whether a signature says no more than another one with the output B: equal pieces have themselves for average,
    maximum and minimum."""
    if signature.output not in ("P(avg)", "P(max)", "P(min)"):
        return False
    return any(other.output == "B" and other.inputs == signature.inputs for other in all_of_it)


# A call: a function with its arguments, some of which are tensors (they may nest).
Function = Callable[..., Any]


def judge_calls(
    function: Function,
    calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    seed_word: str,
    redraws: int = 2,
    mesh_sizes: Sequence[int] = MESH_SIZES,
    vary: Callable[[str, torch.Tensor, np.random.Generator], torch.Tensor] | None = None,
) -> list[Judged]:
    """Find the true signatures of ``function`` from sample calls.

    Args:
        function: the operator; it must not depend on anything but its arguments.
        calls: arguments and keyword arguments. Calls of one kind (equal arguments but for the tensors' values and
            sizes) are judged together: a signature must hold in all of them.
        seed_word: the draws depend on it alone.
        redraws: how often the values of each call are drawn anew, beside its own.
        mesh_sizes: the numbers of ranks to try.
        vary: draws new values for an input of that name; None for :func:`vary_values`.

    Returns: one entry for each kind of call, in the order of their first call. Calls whose result is empty, all zero
        or holds no tensor say nothing and are passed over.
    """
    groups: dict[str, _Group] = {}
    for number, (args, kwargs) in enumerate(calls):
        tensors = named_tensors((args, kwargs), "call")
        kind = describe_call(args, kwargs)
        group = groups.get(kind)
        if group is None:
            group = groups[kind] = _Group(kind, tensors)
        for redraw in range(redraws + 1):
            random = np.random.default_rng(stable_seed("signatures", seed_word, number, redraw))
            drawn = {
                name: tensor if redraw == 0 else (vary or vary_values)(name, tensor, random)
                for name, tensor in tensors.items()
            }
            group.draw(function, args, kwargs, drawn, mesh_sizes, random)
    return [group.result() for group in groups.values() if group.draws]


def describe_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The kind of a call: ``(2d, 2d)``, ``(1d, 0)``, ``(3d, dim=1)``. Large integers and floats, which do not choose
    how an operator works, are shown as they are as well: a kind is rather too narrow than too wide."""
    words = [_describe(arg) for arg in args] + [
        f"{name}={_describe(value)}" for name, value in kwargs.items()
    ]
    return f"({', '.join(words)})"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = "" if value.dtype in (torch.float64, torch.complex128) else f" {str(value.dtype)[6:]}"
        return f"{value.ndim}d{kind}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_describe(item)}' for key, item in value.items())}}}"
    if callable(value):
        return getattr(value, "__name__", "function")
    return str(value)


def vary_values(name: str, tensor: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """New values for an input: floats are drawn around the old ones' magnitudes with both signs where the old ones
    had both; integers and booleans are shuffled, so that indices stay valid."""
    if tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        scale = torch.from_numpy(np.asarray(random.uniform(0.6, 1.4, tuple(tensor.shape))))
        flat = (tensor.detach() * scale.to(tensor.dtype)).reshape(-1)
        order = torch.from_numpy(random.permutation(flat.numel()))
        return flat[order].reshape(tensor.shape)
    order = torch.from_numpy(random.permutation(tensor.numel()))
    return tensor.reshape(-1)[order].reshape(tensor.shape)


class _Group:
    """The signatures of one kind of call that nothing has refuted yet."""

    def __init__(self, call: str, tensors: dict[str, torch.Tensor]) -> None:
        self.call = call
        self.names = tuple(tensors)
        self.draws = 0
        self.tested = 0
        self.raised: dict[str, str] = {}
        choices = [_input_choices(tensor) for tensor in tensors.values()]
        total = int(np.prod([len(choice) for choice in choices], dtype=np.float64)) if choices else 0
        combinations = (
            list(itertools.islice(itertools.product(*choices), MOST_COMBINATIONS)) if choices else []
        )
        self.left_out = max(0, total - len(combinations))
        # Combination -> output name -> output placement -> draws withstood. None: not judged yet.
        self.alive: dict[tuple[Placement, ...], dict[str, dict[Placement, int]] | None] = dict.fromkeys(
            combinations
        )

    def draw(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        drawn: dict[str, torch.Tensor],
        mesh_sizes: Sequence[int],
        random: np.random.Generator,
    ) -> None:
        """Judge what is left by one draw of the values, on each mesh."""
        values = {name: _settle(tensor) for name, tensor in drawn.items()}
        try:
            outputs = _run(function, args, kwargs, values)
        except Exception:
            return  # drawn values that the operator does not take
        expected = {name: to_numpy(tensor) for name, tensor in outputs.items()}
        telling = {name: value for name, value in expected.items() if _tells(value)}
        if not telling:
            return
        self.draws += 1
        arrays = {name: to_numpy(tensor) for name, tensor in values.items()}
        for size in mesh_sizes:
            mesh = Mesh((size,))
            pieces: dict[tuple[str, Placement], list[torch.Tensor] | None] = {}
            for combination in list(self.alive):
                self._judge(
                    function, args, kwargs, values, arrays, telling, combination, mesh, pieces, random
                )

    def _judge(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: dict[str, torch.Tensor],
        arrays: dict[str, Array],
        expected: dict[str, Array],
        combination: tuple[Placement, ...],
        mesh: Mesh,
        pieces: dict[tuple[str, Placement], list[torch.Tensor] | None],
        random: np.random.Generator,
    ) -> None:
        alive = self.alive[combination]
        if alive is not None and not any(alive.values()):
            del self.alive[combination]
            return
        cut = []
        for name, placement in zip(self.names, combination, strict=True):
            key = name, placement
            if key not in pieces:
                pieces[key] = _cut(arrays[name], values[name], placement, mesh, random)
            cut.append(pieces[key])
        if any(piece is None for piece in cut):
            return
        results: list[dict[str, torch.Tensor]] = []
        for rank in range(mesh.size):
            local = {name: part[rank] for name, part in zip(self.names, cut, strict=True) if part is not None}
            try:
                results.append(_run(function, args, kwargs, local))
            except Exception as error:
                # An operator may refuse an empty piece; that says nothing about the signature.
                if all(tensor.numel() for tensor in local.values()):
                    self.raised[", ".join(map(str, combination))] = f"{type(error).__name__}: {error}"[:200]
                    self.alive[combination] = {}
                return
        if alive is None:
            alive = self.alive[combination] = {}
        for name, whole in expected.items():
            held = [to_numpy(result[name]) for result in results if name in result]
            if len(held) < mesh.size:
                alive[name] = {}
                continue
            if name not in alive:
                alive[name] = dict.fromkeys(_output_choices(whole), 0)
                self.tested += len(alive[name])
            for placement in list(alive[name]):
                if _combines(held, placement, mesh, whole):
                    alive[name][placement] += 1
                else:
                    del alive[name][placement]

    def result(self) -> Judged:
        outputs: dict[str, list[Signature]] = {}
        for combination, alive in self.alive.items():
            for name, placements in (alive or {}).items():
                for placement, draws in placements.items():
                    if draws:
                        inputs = tuple(map(str, combination))
                        outputs.setdefault(name, []).append(Signature(inputs, str(placement), draws))
        return Judged(
            self.call,
            self.names,
            outputs,
            self.tested,
            self.draws * len(MESH_SIZES),
            self.left_out,
            self.raised,
        )


def _run(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The output tensors by name. The inputs are copied, since the operator may write to them."""
    called = map_tensors((args, kwargs), lambda name, _: tensors[name].clone(), "call")
    return named_tensors(function(*called[0], **called[1]), "output")


def _settle(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the lowest bits off, so that partial pieces add up exactly."""
    if tensor.dtype in (torch.float64, torch.complex128):
        return torch.from_numpy(on_grid(to_numpy(tensor)))
    return tensor.detach().clone()


def _tells(value: Array) -> bool:
    """Whether a result can tell a right signature from a wrong one: not empty, and not all zero, where every
    placement would seem right."""
    return bool(value.size) and bool(np.any(value))


def _input_choices(tensor: torch.Tensor) -> list[Placement]:
    choices = [B, *(S(dim) for dim in range(tensor.ndim))]
    if tensor.is_floating_point() or tensor.is_complex():
        choices.append(P())
    return choices


def _output_choices(whole: Array) -> list[Placement]:
    choices = [B, *(S(dim) for dim in range(whole.ndim))]
    if whole.dtype.kind == "c":
        choices += [P("sum"), P("avg")]
    elif whole.dtype.kind == "f":
        choices += [P(reduction) for reduction in _PARTIAL_RESULTS]
    elif whole.dtype.kind in "iu":
        choices += [P("sum"), P("max"), P("min")]
    return choices


def _cut(
    array: Array, like: torch.Tensor, placement: Placement, mesh: Mesh, random: np.random.Generator
) -> list[torch.Tensor] | None:
    if placement.is_partial and array.dtype not in (np.float64, np.complex128):
        return None  # pieces of few bits would not add up
    parts = split(array, (placement,), mesh, random)
    return [torch.from_numpy(np.array(part)).to(like.dtype) for part in parts]


def _combines(held: list[Array], placement: Placement, mesh: Mesh, whole: Array) -> bool:
    """Whether the pieces are those of ``whole`` under the placement."""
    if placement.kind == "B":
        return all(_equal(piece, whole) for piece in held)
    if placement.is_split:
        for rank, piece in enumerate(held):
            if piece.shape != local_shape(whole.shape, (placement,), mesh, rank):
                return False
    elif any(piece.shape != whole.shape for piece in held):
        return False
    try:
        return _equal(combine(held, (placement,), mesh, whole.shape), whole)
    except LayoutError:
        return False


def _equal(one: Array, other: Array) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind in "biu":
        return bool(np.array_equal(one, other))
    scale = float(np.max(np.abs(other), initial=0.0, where=np.isfinite(other))) or 1.0
    tolerance = _TOLERANCE if one.dtype in (np.float64, np.complex128) else 1e-4
    return bool(np.allclose(one, other, rtol=0.0, atol=tolerance * scale, equal_nan=True))


def gradient_of(function: Function, argument: str) -> Function:
    """The gradient of ``function`` to the tensor argument of that name, as an operator of the arguments and of one
    more, the list of cotangents, which comes first."""

    def gradient(
        cotangents: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        leaves = map_tensors(
            (args, kwargs),
            lambda name, tensor: tensor.detach().requires_grad_(True) if name == argument else tensor,
            "call",
        )
        leaf = named_tensors(leaves, "call")[argument]
        outputs = [
            tensor
            for tensor in named_tensors(function(*leaves[0], **leaves[1]), "output").values()
            if tensor.requires_grad
        ]
        (found,) = torch.autograd.grad(outputs, leaf, cotangents[: len(outputs)])
        return found

    return gradient


def gradient_calls(
    function: Function, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]], seed_word: str
) -> Iterator[tuple[str, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """For each call and each input that has a gradient: its name, and the call of :func:`gradient_of`."""
    for number, (args, kwargs) in enumerate(calls):
        random = np.random.default_rng(stable_seed("cotangents", seed_word, number))
        for name, tensor in named_tensors((args, kwargs), "call").items():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            leaves = map_tensors(
                (args, kwargs), lambda each, t, name=name: t.detach().requires_grad_(each == name), "call"
            )
            outputs = named_tensors(function(*leaves[0], **leaves[1]), "output").values()
            roots = [output for output in outputs if output.requires_grad]
            if not roots or len(roots) > 2:
                continue
            cotangents = [_draw_like(root, random) for root in roots]
            yield name, ((cotangents, args, kwargs), {})


def _draw_like(tensor: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    values = torch.from_numpy(np.asarray(random.standard_normal(tuple(tensor.shape))))
    if tensor.is_complex():
        values = torch.complex(
            values, torch.from_numpy(np.asarray(random.standard_normal(tuple(tensor.shape))))
        )
    return values.to(tensor.dtype)
