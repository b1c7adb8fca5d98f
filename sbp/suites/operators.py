"""The ops suite: torch's operators, in all forms that they have, over the placements of their operands.

A case is an operator, the number of a sample call, and a form: the plain call with its gradients, the in-place variant,
the ``out=`` variant, a write through the result where that is a view of the operand, and the ``_foreach`` forms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch

from sbp.apart import Died, call_apart
from sbp.execute import MakeOptimizer
from sbp.numbers import draw_normal, on_grid
from sbp.oracle.reference import Reference, compute_reference
from sbp.plan import PlanOptions, placement_rows
from sbp.program import Program
from sbp.suites.modules import kind_of
from sbp.suites.operator_database import Operator, OperatorSample, find_operator, operators
from sbp.trees import map_tensors, named_tensors
from sbp.trial import Trial, stable_seed

FORMS = ("forward", "inplace", "out", "view", "foreach", "foreach_")
# Different sample calls of an operator, and how many of them are tried below the full level.
SAMPLES = 12
SAMPLES_BELOW_FULL = 3
# A result that moves by more than this (relative norm) when the operands move by one part in _SMALL jumps: it is a
# matter of rounding, as the sign of a singular vector is, and no two ways to compute it need to agree.
_JUMP = 1e-7
_SMALL = 1e-13
# How long the planning of one operator may take, in seconds.
_PATIENCE = 120.0
_PLANNED_TOGETHER = 8

# The trials of a case, and why there are none.
_Plan = tuple[list[Trial], str]


@dataclass(frozen=True)
class InPlace:
    """Calls the in-place variant. Returns what that returns, a view that was made before, and whether the result is
    the operand itself."""

    function: Callable[..., Any]

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        view = input.unsqueeze(0)
        result = self.function(input, *args, **kwargs)
        return {"result": result, "view": view, "is_same": torch.tensor(result is input)}


@dataclass(frozen=True)
class Into:
    """Calls the ``out=`` variant, the tensors to write to being its first argument."""

    function: Callable[..., Any]

    def __call__(self, out: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, out=out, **kwargs)


@dataclass(frozen=True)
class ThroughView:
    """Writes to what the operator returns, a view of its operand, which then has changed as well."""

    function: Callable[..., Any]

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result = self.function(input, *args, **kwargs)
        for tensor in named_tensors(result, "result").values():
            tensor.mul_(2)
        return {"result": result, "viewed": input}


@dataclass(frozen=True)
class Foreach:
    """Calls ``torch._foreach_NAME`` with lists of each operand twice."""

    name: str

    def __call__(self, *operands: Any) -> Any:
        lists = [[value, value.clone()] if isinstance(value, torch.Tensor) else value for value in operands]
        result = getattr(torch, self.name)(*lists)
        return lists[0] if self.name.endswith("_") else result


class OperatorSuite:
    """See the module's docstring. ``skipped`` tells which cases were left out while planning, and why."""

    name = "ops"

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self._by_operator: dict[str, list[str]] = {}
        # What was planned ahead with which options, by case.
        self._planned: tuple[PlanOptions | None, dict[str, _Plan]] = (None, {})

    def cases(self) -> Iterator[str]:
        for operator in operators():
            for number in range(SAMPLES):
                for form in FORMS:
                    if form == "forward" or _has_form(operator, form):
                        yield f"{operator.name}-{number}" + ("" if form == "forward" else f":{form}")

    def build(self, case: str, dtype: str, device: str) -> Program:
        operator, number, form = _read(case)
        wanted = getattr(torch, dtype) if dtype != "float64" else operator.dtype
        program = _program(operator, _sample(operator.name, number), form)
        differentiable = _differentiable(case) if form in ("forward", "foreach") else frozenset()

        def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor.detach().clone().to(device)
            values = tensor.detach().resolve_conj().resolve_neg()
            if tensor.dtype in (torch.float64, torch.complex128):
                values = torch.from_numpy(on_grid(values.numpy()))
                if tensor.is_floating_point():
                    values = values.to(wanted)
            return values.clone().to(device).requires_grad_(name in differentiable)

        program = program.with_inputs(convert)
        return replace(program, random=True) if operator.is_random else program

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        return None

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        if self._planned[0] != options:
            self._planned = options, {}
        planned = self._planned[1]
        if case not in planned and _is_wanted(case, options):
            planned.update(self._plan_apart(_operator_of(case), options))
        trials, reason = planned.pop(case, ([], ""))
        if reason:
            self.skipped[case] = reason
        return trials

    def _plan_apart(self, operator: str, options: PlanOptions) -> dict[str, _Plan]:
        """Plan an operator and the next ones in a process of their own: some calls crash the interpreter on one device
        already. Where that happens, each operator gets its own."""
        if not self._by_operator:
            for case in self.cases():
                self._by_operator.setdefault(_operator_of(case), []).append(case)
        names = list(self._by_operator)
        first = names.index(operator)
        batch = names[first : first + _PLANNED_TOGETHER]
        cases = [each for name in batch for each in self._by_operator[name] if _is_wanted(each, options)]
        try:
            return dict(zip(cases, call_apart(partial(self._plan_all, cases, options), _PATIENCE)))
        except Died:
            mine = [each for each in self._by_operator[operator] if _is_wanted(each, options)]
        try:
            return dict(zip(mine, call_apart(partial(self._plan_all, mine, options), _PATIENCE)))
        except Died as error:
            return dict.fromkeys(mine, ([], f"torch itself ends the process: {error}"))

    def _plan_all(self, cases: list[str], options: PlanOptions) -> list[_Plan]:
        return [self._plan_or_skip(case, options) for case in cases]

    def _plan_or_skip(self, case: str, options: PlanOptions) -> _Plan:
        """The trials of a case, or why there are none."""
        operator, number, _ = _read(case)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if number >= len(_samples(operator.name)):
                    return [], ""
                reference = self._reference(case)
                program = self.build(case, "float64", "cpu")
        except _Skip as skip:
            return [], str(skip)
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            return [], f"torch itself raises {type(error).__name__}: {text}"
        tensors = {name: (tensor.ndim, kind_of(tensor)) for name, tensor in program.inputs().items()}
        tensors |= {f"grad_{name}": (v.ndim, v.dtype.kind) for name, v in reference.cotangents.items()}
        fixed = {name: sbp for name, sbp in (options.placements or {}).items() if name in tensors}
        trials = []
        for mesh in options.meshes:
            # Pairs of operands tell more of the plain call than of its other forms, which share its rules.
            each = 1 if ":" in case else 3
            most = None if options.rows is None else max(1, each * options.rows // mesh.ndim)
            rows, _ = placement_rows(
                tensors, mesh, options.full_product_up_to, options.partial, fixed, most=most
            )
            for dtype in options.dtypes:
                for row in rows:
                    where = (dtype, options.device, options.subject)
                    trials.append(Trial(self.name, case, str(mesh), row, "forward", {}, *where))
        return trials, ""

    def _reference(self, case: str) -> Reference:
        """The reference of a case that can be compared. Raises _Skip with the reason where none can."""
        program = self.build(case, "float64", "cpu")
        if not program.inputs():
            raise _Skip("no tensor among its operands")
        if any(tensor.layout != torch.strided for tensor in program.inputs().values()):
            raise _Skip("sparse operands")
        reference = compute_reference(program, case, seed=1)
        if not reference.quantities:
            raise _Skip("no tensor among its results")
        if program.random:
            return reference
        again = compute_reference(program, case, seed=2)
        if any(
            _differs(one.value, again.quantities[name].value, 0.0)
            for name, one in reference.quantities.items()
        ):
            raise _Skip("random, or not initialised: two calls differ")
        near = compute_reference(program.with_inputs(_move), case, seed=1)
        for name, one in reference.quantities.items():
            if name not in near.quantities or _differs(one.value, near.quantities[name].value, _JUMP):
                raise _Skip(f"{name} jumps when the operands move by one part in {1 / _SMALL:.0e}")
        if not any(quantity.norm > 0 for quantity in reference.quantities.values()):
            raise _Skip("no signal: every result of the reference is zero or empty")
        return reference


@lru_cache(maxsize=256)
def _differentiable(case: str) -> frozenset[str]:
    """The operands that a gradient can be taken of: all of floating dtypes, or the first where torch refuses that."""
    operator, number, form = _read(case)
    if not operator.differentiable:
        return frozenset()
    program = _program(operator, _sample(operator.name, number), form)
    floating = [name for name, t in program.inputs().items() if t.is_floating_point() or t.is_complex()]
    for names in (floating, floating[:1]):
        leaves = program.with_inputs(partial(_leaf, names))
        try:
            outputs = named_tensors(leaves.function(*leaves.args, **leaves.kwargs), "output")
        except RuntimeError:
            continue
        if any(output.requires_grad for output in outputs.values()):
            return frozenset(names)
    return frozenset()


def _leaf(differentiable: list[str], name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(name in differentiable)


class _Skip(Exception):
    """Why a case cannot be compared."""


def _move(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    random = np.random.default_rng(stable_seed("move", name))
    moved = tensor.detach() * torch.from_numpy(
        np.asarray(1 + _SMALL * random.uniform(-1, 1, tuple(tensor.shape)))
    )
    return moved.to(tensor.dtype).requires_grad_(tensor.requires_grad)


def _operator_of(case: str) -> str:
    return case.partition(":")[0].rpartition("-")[0]


def _is_wanted(case: str, options: PlanOptions) -> bool:
    """Whether a case belongs to the level that the options ask for."""
    number = int(case.partition(":")[0].rpartition("-")[2])
    return number < (SAMPLES if options.rows is None else SAMPLES_BELOW_FULL)


def _differs(one: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any] | None, tolerance: float) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return (one is None) != (other is None) or (one is not None and other is not None)
    if np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return False
    if one.dtype.kind not in "fc" or tolerance == 0.0:
        return True
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(other)):
        return True
    size = float(np.linalg.norm(one[finite]))
    return float(np.linalg.norm(one[finite] - other[finite])) > tolerance * size


def _read(case: str) -> tuple[Operator, int, str]:
    named, _, form = case.partition(":")
    name, _, number = named.rpartition("-")
    return find_operator(name), int(number), form or "forward"


@cache
def _samples(name: str) -> list[OperatorSample]:
    """The samples of an operator, each of another kind: those that have something to split first. Of the first kind
    there is one in even sizes and one in uneven ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = find_operator(name).variants(SAMPLES - 1, draws=1, by_sizes=True)
    kinds.sort(key=lambda kind: any(t.ndim == 0 for t in named_tensors(kind[0].args, "").values()))
    if not kinds:
        return []
    middle = len(kinds) // 2
    order = [0, middle, *(number for number in range(1, len(kinds)) if number != middle)]
    even = [kinds[number][0] for number in order]
    first, *others = even
    lacking = [make() for of, make in _LACKING if of == name]
    return [first, *lacking, *others[:1], *kinds[0][1:2], *others[1:]][:SAMPLES]


def _fewer_rows(*others: torch.Tensor) -> OperatorSample:
    """Along dimension 1, with an index that has fewer rows than the operand."""
    random = np.random.default_rng(stable_seed("fewer rows"))
    operand = torch.from_numpy(draw_normal((8, 6), random))
    # Each column once in a row, so that the order of writes does not matter.
    index = torch.from_numpy(np.stack([random.permutation(6)[:4] for _ in range(4)]))
    return OperatorSample((operand, 1, index, *others))


# What the database has no sample of.
_LACKING: tuple[tuple[str, Callable[[], OperatorSample]], ...] = (
    ("gather", _fewer_rows),
    ("scatter", lambda: _fewer_rows(torch.arange(1.0, 25.0, dtype=torch.float64).reshape(4, 6))),
    ("scatter_add", lambda: _fewer_rows(torch.arange(1.0, 25.0, dtype=torch.float64).reshape(4, 6))),
)


def _sample(name: str, number: int) -> OperatorSample:
    return _samples(name)[number]


def _has_form(operator: Operator, form: str) -> bool:
    if form == "inplace":
        return operator.inplace is not None
    if form == "out":
        return operator.has_out
    if form == "view":
        return operator.is_view
    return hasattr(torch, f"_foreach_{operator.name}" + ("_" if form == "foreach_" else ""))


def _program(operator: Operator, sample: OperatorSample, form: str) -> Program:
    args, kwargs = sample.args, sample.kwargs
    if form == "inplace":
        assert operator.inplace is not None
        keeps = not _changes_shape(operator.inplace)
        return Program(
            InPlace(operator.inplace), args, kwargs, _names(args), writes=("input",), keeps_placement=keeps
        )
    if form == "out":
        result = operator.function(*args, **kwargs)
        out = map_tensors(result, lambda _, tensor: torch.zeros_like(tensor).detach(), "out")
        if not named_tensors(out, "out"):
            raise _Skip("no tensor to write to")
        written = tuple(named_tensors(out, "out"))
        return Program(
            Into(operator.function),
            (out, *args),
            kwargs,
            ("out", *_names(args)),
            writes=written,
            keeps_placement=False,
        )
    if form == "view":
        return Program(ThroughView(operator.function), args, kwargs, _names(args), writes=("input",))
    if form in ("foreach", "foreach_"):
        if kwargs or not all(isinstance(value, (torch.Tensor, int, float)) for value in args):
            raise _Skip("its operands are not tensors and numbers alone")
        name = f"_foreach_{operator.name}" + ("_" if form == "foreach_" else "")
        writes = ("input",) if form == "foreach_" else ()
        return Program(Foreach(name), args, kwargs, _names(args), writes=writes)
    return Program(operator.function, args, kwargs, _names(args))


def _changes_shape(method: Callable[..., Any]) -> bool:
    """Whether an in-place method gives its tensor other dimensions (``squeeze_``, ``t_``): its placement is then
    another one as well."""
    packet = getattr(torch.ops.aten, getattr(method, "__name__", ""), None)
    if packet is None:
        return False
    return any(torch.Tag.inplace_view in getattr(packet, overload).tags for overload in packet.overloads())


def _names(args: tuple[Any, ...]) -> tuple[str, ...]:
    """The first operand is called input, as in torch, and the others other, other_2 and so on."""
    names = ["input"]
    for position in range(1, len(args)):
        names.append("other" if position == 1 else f"other_{position}")
    return tuple(names[: len(args)])


def warm_up() -> None:
    """Import the database, so that forked processes need not."""
    from sbp.suites import operator_database

    operator_database.load()


SUITE = OperatorSuite()


def describe(case: str) -> Mapping[str, Any]:
    """What a case is, for a person: the call."""
    program = SUITE.build(case, "float64", "cpu")
    return {"inputs": {name: list(tensor.shape) for name, tensor in program.inputs().items()}}
