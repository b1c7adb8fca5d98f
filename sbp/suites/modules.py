"""The module suite: modules from torch's database and those that it lacks, forward, backward and in training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from sbp.execute import MakeOptimizer
from sbp.numbers import on_grid
from sbp.oracle.reference import Reference, compute_reference
from sbp.placement import Mesh
from sbp.plan import PlanOptions, placement_rows
from sbp.program import Program
from sbp.suites import module_database
from sbp.suites.module_cases import CASES
from sbp.trial import Trial, stable_seed

# How many samples of one class of the database the default run takes, spread over all it has.
SAMPLES_OF_A_CLASS = 4
# How many placements of a case are trained with each optimizer (on a mesh of one axis), and among how many of the
# first ones they are chosen.
TRAINED_ROWS = 5
ROWS_TO_CHOOSE_FROM = 30
# On a mesh of several axes DTensor's search for a strategy grows with a power of the number of axes: a transformer
# layer takes it over 20 seconds. Modules with more tensors than this are tried there at the full level only.
MOST_TENSORS_ON_SEVERAL_AXES = 10

OPTIMIZERS: dict[str, Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]] = {
    # Fractions of powers of two: exact in float32 too, which is what some frameworks keep these numbers in.
    "SGD": lambda named: torch.optim.SGD(
        [p for _, p in named], lr=0.125, momentum=0.875, weight_decay=2.0**-7
    ),
    # AdamW divides by the gradient's size: where that is nothing but rounding (the bias of attention keys), a small
    # eps would blow it up to a difference that is no fault.
    "AdamW": lambda named: torch.optim.AdamW(
        [p for _, p in named],
        lr=2.0**-7,
        betas=(0.875, 1 - 2.0**-8),
        weight_decay=0.125,
        eps=2.0**-13,
    ),
}


class ModuleSuite:
    """See the module's docstring. ``skipped`` tells which cases were left out while planning, and why."""

    name = "modules"

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self.how_planned: dict[str, int] = {}

    def cases(self) -> Iterator[str]:
        # The own cases come first: the database takes seconds to import.
        yield from CASES
        yield from _database_cases()

    def build(self, case: str, dtype: str, device: str) -> Program:
        torch.manual_seed(stable_seed("build", case) % 2**31)
        if case in CASES:
            module, args, kwargs = CASES[case]()
        else:
            entry, mode = _database_cases()[case]
            training = mode == "train"
            cls, built_args, built_kwargs, args, kwargs = module_database.arguments(
                entry.module, entry.index, training, torch.float64
            )
            torch.manual_seed(stable_seed("build", case) % 2**31)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = cls(*built_args, **built_kwargs).train(training)
        return prepare(Program(module, args, kwargs), case, getattr(torch, dtype), torch.device(device))

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        return OPTIMIZERS[trial.options["optimizer"]] if trial.kind == "train" else None

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        try:
            program, reference = self._reference(case)
        except Exception as error:
            self.skipped[case] = f"the reference itself raises {type(error).__name__}: {error}"
            return
        if program is None:
            return
        tensors = {
            name: (tensor.ndim, kind_of(tensor))
            for name, tensor in program.tensors().items()
            if name not in program.buffers()
            # Attention with a mask that is not B sends DTensor on a search of over a minute for a strategy: below the
            # full level masks stay B.
            and (options.rows is None or kind_of(tensor) != "b")
        }
        cotangents = {f"grad_{name}": (v.ndim, v.dtype.kind) for name, v in reference.cotangents.items()}
        for mesh in options.meshes:
            if mesh.ndim > 1 and options.rows is not None and len(tensors) > MOST_TENSORS_ON_SEVERAL_AXES:
                self.skipped[f"{case} on {mesh}"] = (
                    f"{len(tensors)} tensors on several axes: --level full runs it"
                )
                continue
            for dtype in options.dtypes:
                yield from self._trials(case, {**tensors, **cotangents}, mesh, dtype, options, program)

    def _trials(
        self,
        case: str,
        tensors: Mapping[str, tuple[int, str]],
        mesh: Mesh,
        dtype: str,
        options: PlanOptions,
        program: Program,
    ) -> Iterator[Trial]:
        fixed = {name: sbp for name, sbp in (options.placements or {}).items() if name in tensors}
        # Faults of a rule show on one axis already; further axes are for what their combination breaks.
        most = None if options.rows is None else max(1, options.rows // mesh.ndim)
        rows, how = placement_rows(
            tensors,
            mesh,
            options.full_product_up_to,
            options.partial,
            fixed,
            most=None if most is None else max(most, ROWS_TO_CHOOSE_FROM),
        )
        self.how_planned[how] = self.how_planned.get(how, 0) + 1
        for row in rows[:most]:
            yield Trial(
                self.name, case, str(mesh), row, "forward", {}, dtype, options.device, options.subject
            )
        if program.module is None or not program.parameters() or not program.module.training:
            return
        # The choice does not depend on the level, so that a trial's id can be found again at another one.
        candidates = rows[:ROWS_TO_CHOOSE_FROM]
        for row in _rows_to_train(candidates, program, TRAINED_ROWS // mesh.ndim)[:most]:
            for optimizer in options.optimizers:
                chosen = {"optimizer": optimizer}
                yield Trial(
                    self.name, case, str(mesh), row, "train", chosen, dtype, options.device, options.subject
                )

    def _reference(self, case: str) -> tuple[Program | None, Reference]:
        """The program and its reference; None with a note in ``skipped`` where no comparison would mean anything."""
        program = self.build(case, "float64", "cpu")
        reference = compute_reference(program, case, seed=1)
        again = compute_reference(program, case, seed=2)
        for name, one in reference.quantities.items():
            other = again.quantities[name].value
            if one.value is None or other is None:
                continue
            if not np.array_equal(one.value, other, equal_nan=True):
                self.skipped[case] = f"random: two runs differ in {name}"
                return None, reference
        if not any(quantity.norm > 0 for quantity in reference.quantities.values()):
            self.skipped[case] = "no signal: every result of the reference is zero or empty"
            return None, reference
        return program, reference


def _rows_to_train(rows: list[dict[str, str]], program: Program, most: int) -> list[dict[str, str]]:
    """A few placements to train under: one input at a time (data parallel) and one parameter at a time, split
    before partial, then the mixed ones."""
    inputs, parameters = program.inputs(), program.parameters()

    def order(row: dict[str, str]) -> tuple[int, int]:
        alone = len(row) <= 1
        partial = any("P" in sbp for sbp in row.values())
        touches = any(name in parameters for name in row) or any(name in inputs for name in row)
        return (0 if alone and touches else 1, 1 if partial else 0)

    ranked = sorted((row for row in rows if row), key=order)
    # Spread over the ranking, so that inputs, parameters, splits and partials are all among the few.
    count = min(most, len(ranked))
    return [ranked[index * len(ranked) // count] for index in range(count)]


def prepare(program: Program, case: str, dtype: torch.dtype, device: torch.device) -> Program:
    """The program in ``dtype``, with values that a wrong answer cannot hide in.

    Parameters lose their neutral initial values (a norm's weight of one, a bias of zero), running statistics
    theirs, and all values lose their lowest bits, so that partial pieces add up exactly.
    """
    random = np.random.default_rng(stable_seed("values", case))
    if program.module is not None:
        module = program.module.to(torch.float64)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                _spread(name, parameter, random)
            for name, buffer in module.named_buffers():
                _spread(name, buffer, random)
        program.module.to(dtype)

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.to(device)
        values = torch.from_numpy(on_grid(tensor.detach().double().numpy()))
        return values.to(dtype).to(device).requires_grad_(tensor.requires_grad)

    if program.module is not None:
        program.module.to(device)
    return program.with_inputs(convert)


def _spread(name: str, tensor: torch.Tensor, random: np.random.Generator) -> None:
    """Move a parameter or buffer away from its neutral initial value, in place."""
    if name.endswith("num_batches_tracked"):
        tensor.fill_(3)
        return
    if not tensor.is_floating_point():
        return
    noise = torch.from_numpy(random.uniform(0.1, 0.5, tuple(tensor.shape)))
    sign = torch.from_numpy(random.choice([-1.0, 1.0], tuple(tensor.shape)))
    # A variance stays positive.
    tensor.add_(noise if name.endswith("running_var") else noise * sign)
    tensor.copy_(torch.from_numpy(on_grid(tensor.detach().numpy())))


def kind_of(tensor: torch.Tensor) -> str:
    """numpy's letter for the kind of the tensor's dtype."""
    if tensor.is_complex():
        return "c"
    if tensor.is_floating_point():
        return "f"
    return "b" if tensor.dtype == torch.bool else "i"


@cache
def _database_cases() -> dict[str, tuple[module_database.DatabaseEntry, str]]:
    """Case name -> the database's sample and the mode. Only some samples of a class are taken."""
    by_class: dict[str, list[module_database.DatabaseEntry]] = {}
    for entry in module_database.entries():
        by_class.setdefault(entry.module, []).append(entry)
    named: dict[str, tuple[module_database.DatabaseEntry, str]] = {}
    for samples in by_class.values():
        count = min(SAMPLES_OF_A_CLASS, len(samples))
        for position in range(count):
            entry = samples[position * len(samples) // count]
            for mode in entry.modes:
                suffix = f":{mode}" if len(entry.modes) > 1 else ""
                named[f"{entry.module}-{entry.index}{suffix}"] = entry, mode
    return named


SUITE = ModuleSuite()


def warm_up() -> None:
    """Import the database and list its cases, so that forked processes need not."""
    _database_cases()


def describe(case: str) -> dict[str, Any]:
    """What a case is, for a person: the constructor's arguments and the shapes of the inputs."""
    program = SUITE.build(case, "float64", "cpu")
    shapes = {name: list(tensor.shape) for name, tensor in program.inputs().items()}
    return {"module": repr(program.module), "inputs": shapes}
