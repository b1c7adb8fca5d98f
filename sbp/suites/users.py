"""The suite of a user's own cases: ``my_cases.py``, ``my_cases.py:mlp``, ``package.module:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sbp.cases import Call, Case, CaseError, Train
from sbp.execute import MakeOptimizer
from sbp.oracle.reference import Reference, compute_reference
from sbp.placement import SBP, B, Mesh, PlacementError, normalise, parse, parse_mesh, parse_sbp, show
from sbp.plan import PlanOptions, placement_rows
from sbp.program import VALUE, Batch, Program, Recipe
from sbp.subjects.parallel import Grids, ParallelSubject
from sbp.subjects.pieces import PieceCache
from sbp.subjects.planned import PlannedSubject, aliases
from sbp.subjects.spmd import SpmdSubject
from sbp.suites import SuiteError, optimizers
from sbp.suites.modules import kind_of, prepare
from sbp.trial import Trial, stable_seed

# Where errors that are the user's own to mend are shown: below these folders they are not.
_OWN = str(Path(__file__).resolve().parents[1])
# A user has few cases where the built-in suites have hundreds: so many times as many placements of each are tried.
_ROWS = 4
LOW_DTYPE = "float32"  # what autocast starts from; it leaves float64 alone


def load_module(target: str) -> ModuleType:
    """Import a case file or module.

    A file is imported under a name of its own, or as part of the package that it lies in; its folder is put on
    ``sys.path`` as for a script. Raises SuiteError with one line for whatever goes wrong.
    """
    if not is_file(target):
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        return _import(target, lambda: importlib.import_module(target))
    path = Path(target).resolve()
    if not path.is_file():
        raise SuiteError(f"there is no file {target}")
    root, words = path.parent, [path.stem]
    while (root / "__init__.py").exists():
        root, words = root.parent, [root.name, *words]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(words) > 1:
        return _import(target, lambda: importlib.import_module(".".join(words)))
    # A unique name, so that a file called random.py or tests.py hides nothing.
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = f"_sbp_cases_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]

    def run() -> ModuleType:
        _make_way(root)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return _import(target, run)


# The folders of the case files that were loaded.
_FOLDERS: set[str] = set()


def _make_way(folder: Path) -> None:
    """Have the imports of a case file find its own neighbours: modules of the same names that lie beside other case
    files are forgotten."""
    here = str(folder)
    if sys.path[0] != here:
        sys.path.remove(here)
        sys.path.insert(0, here)
    others = _FOLDERS - {here}
    hiding = set()
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if "." in name or not file:
            continue
        lies_in = Path(file).parent.parent if hasattr(module, "__path__") else Path(file).parent
        if str(lies_in) in others and ((folder / f"{name}.py").exists() or (folder / name).is_dir()):
            hiding.add(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in hiding]:
        del sys.modules[name]
    _FOLDERS.add(here)


def _import(target: str, run: Callable[[], ModuleType]) -> ModuleType:
    try:
        return run()
    except CaseError as error:
        raise SuiteError(f"{target}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it is, a file raised it as it was imported
        raise SuiteError(f"{target} cannot be loaded: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An exception in one line, with the user's source line that it came from."""
    try:
        words = str(error).strip().splitlines()
    except Exception:
        words = ["(its text could not be made)"]
    text = f"{type(error).__name__}: {words[0][:300]}" if words else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    installed = (_OWN, os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(installed):
            return f"{text} ({frame.filename}, line {frame.lineno})"
    return text


def is_file(target: str) -> bool:
    return target.endswith(".py")


def split_target(target: str) -> tuple[str, str]:
    """The file or module, and what of it is meant (all, where that is empty)."""
    where, _, what = target.partition(":")
    return where, what


def normalise_target(target: str) -> str:
    """The target as it stands in ids: a file by its path from the working directory, without what is chosen of it."""
    where, what = split_target(target)
    if is_file(where):
        path = os.path.abspath(where)
        inside = os.path.relpath(path)
        return Path(inside if not inside.startswith("..") else path).as_posix()
    return f"{where}:{what}"


def collect(target: str) -> dict[str, Case]:
    """The cases of a target by name, in the order of the file. Raises SuiteError."""
    where, what = split_target(target)
    module = load_module(where)
    found: dict[str, Case] = {}

    def take(value: Any) -> None:
        if isinstance(value, Case):
            if found.get(value.name, value) is not value:
                raise SuiteError(f"{target}: two cases are called {value.name}; give one another name")
            found[value.name] = value
        elif isinstance(value, (list, tuple)):
            for item in value:
                take(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                take(item)

    if not what:
        # A file that imports cases to vary them names its own in __all__.
        for label in getattr(module, "__all__", None) or [*vars(module)]:
            if not label.startswith("__"):
                take(getattr(module, label))
        if not found:
            raise SuiteError(f"{target} has no cases; put @sbp.case before a function that builds one")
        return found
    value: Any = module
    for word in what.split("."):
        if not hasattr(value, word):
            raise SuiteError(f"{where} has no {what}")
        value = getattr(value, word)
    if callable(value) and not isinstance(value, Case):
        try:
            value = list(_several(value()))
        except CaseError as error:
            raise SuiteError(f"{target}: {error}") from error
        except (Exception, SystemExit) as error:
            raise SuiteError(f"{target} cannot be called: {describe(error)}") from error
    take(value)
    if not found:
        raise SuiteError(f"{target} is neither a case nor a function that returns cases")
    return found


def chosen_cases(target: str, suite: Any) -> list[str]:
    """The cases of a target's suite that it means: all of a file, or the ones after its colon."""
    where, what = split_target(target)
    return list(collect(target)) if what and is_file(where) else list(suite.cases())


def _several(value: Any) -> Iterable[Any]:
    return [value] if isinstance(value, (Case, Mapping)) or not isinstance(value, Iterable) else value


class UserSuite:
    """The cases of one target. ``skipped`` tells which were left out while planning, and why."""

    def __init__(self, target: str, cases: Mapping[str, Case] | None = None) -> None:
        self.name = normalise_target(target) if cases is None else target
        self.skipped: dict[str, str] = {}
        self._cases = dict(collect(self.name) if cases is None else cases)
        self._state: tuple[Grids, PieceCache] | None = None

    def cases(self) -> Iterator[str]:
        yield from self._cases

    def case(self, name: str) -> Case:
        """Raises SuiteError."""
        if name not in self._cases:
            raise SuiteError(f"{self.name} has no case {name!r}; it has {', '.join(self._cases)}")
        return self._cases[name]

    # ----------------------------------------------------------------------------------------- building

    def build(self, case: str, dtype: str, device: str) -> Program:
        """Raises SuiteError where the case cannot be built."""
        mine = self.case(case)
        made = self._call(mine, 0)
        count = 1
        if mine.train is not None:
            count = mine.train.steps * mine.train.accumulate
        later = []
        for index in range(1, count):
            again = self._call(mine, index)
            later.append(Batch(again.args, again.kwargs, again.targets))
        program = Program(
            made.function, made.args, made.kwargs, (), made.targets, tuple(later), recipe_of(mine)
        )
        try:
            prepared = prepare(program, f"{self.name}/{case}", getattr(torch, dtype), torch.device(device))
        except Exception as error:
            raise SuiteError(
                f"{self.name}: case {case} cannot be run in {dtype}: {describe(error)}"
            ) from error
        return prepared if mine.gradients else _without_gradients(prepared)

    def _call(self, case: Case, index: int) -> Call:
        """What the case's function returns for its batch ``index``."""
        torch.manual_seed(stable_seed("build", case.name, index) % 2**31)
        try:
            made = case.build()
        except (Exception, SystemExit) as error:
            raise SuiteError(f"{self.name}: case {case.name} cannot be built: {describe(error)}") from error
        if isinstance(made, Call):
            return made
        if isinstance(made, tuple) and made and callable(made[0]):
            return Call(made[0], made[1:])
        raise SuiteError(
            f"{self.name}: case {case.name} must return a module (or function) and its inputs, `module, x`, "
            f"or `call(module, x, mask=mask)`; it returned {_describe_value(made)}"
        )

    # ----------------------------------------------------------------------------------------- planning

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        """The trials of a case. Raises SuiteError where the case itself is wrong."""
        mine = self.case(case)
        program = self.build(case, "float64", options.device)
        chosen: dict[str, MakeOptimizer] = {}
        if mine.train is not None:
            try:
                chosen = optimizers.choose(mine.train.optimizer)
            except CaseError as error:
                raise SuiteError(f"{self.name}: case {case}: {error}") from error
        usable = self._check_reference(mine, program, chosen)
        if mine.train is not None and not usable:
            return []
        if not mine.is_parallel:
            return self._placements_tried(mine, program, usable, options)
        return self._as_declared(mine, program, usable, options)

    def _check_reference(
        self, case: Case, program: Program, chosen: Mapping[str, MakeOptimizer]
    ) -> dict[str, MakeOptimizer]:
        """The optimizers with which the case can be trained on one device. Raises SuiteError."""
        usable: dict[str, MakeOptimizer] = {}
        several: Mapping[str, MakeOptimizer | None] = dict(chosen) if chosen else {"": None}
        for label, make in several.items():
            try:
                reference = compute_reference(program, case.name, make, seed=1)
            except Exception as error:
                if label and len(chosen) > 1:
                    self.skipped[f"{case.name} {label}"] = f"on one device: {describe(error)}"
                    continue
                raise SuiteError(
                    f"{self.name}: case {case.name} fails on one device already: {describe(error)}"
                ) from error
            if not usable:
                self._check_placements(case, program, reference)
                again = compute_reference(program, case.name, make, seed=2)
                self._check_results(case, reference, again)
            if make is not None:
                usable[label] = make
        return usable

    def _check_placements(self, case: Case, program: Program, reference: Reference) -> None:
        """Raises SuiteError where the case places what there is not, or along a dimension that there is not."""
        outputs = {
            name.partition(" of step")[0]: quantity.value.ndim
            for name, quantity in reference.quantities.items()
            if quantity.kind == VALUE and quantity.value is not None
        }
        dimensions = {name: tensor.ndim for name, tensor in program.tensors().items()} | outputs
        dimensions |= {name: dimensions[first] for name, first in aliases(program).items()}
        cotangents = {f"grad_{name}": ndim for name, ndim in outputs.items()}
        whole = {re.split(r"[\[.]", name, maxsplit=1)[0] for name in (*program.inputs(), *outputs)}
        for name, placed in case.placements.items():
            tensor = name.removesuffix(".grad")
            if tensor not in dimensions and tensor not in whole and name not in cotangents:
                raise SuiteError(
                    f"{self.name}: case {case.name} places {name!r}, but has no such tensor; "
                    f"it has {', '.join(dimensions)}"
                )
            words = [placed] if isinstance(placed, str) else list(placed.values())
            ndim = dimensions.get(tensor, cotangents.get(name))
            try:
                for sbp in (parse_sbp(word) for word in words):
                    if ndim is not None:
                        normalise(sbp, ndim)
            except PlacementError as error:
                raise SuiteError(f"{self.name}: case {case.name}: {name}: {error}") from error

    def _check_results(self, case: Case, one: Reference, other: Reference) -> None:
        if not any(quantity.norm > 0 for quantity in one.quantities.values()):
            raise SuiteError(
                f"{self.name}: case {case.name} shows nothing: every result on one device is zero or empty"
            )
        if case.random:
            return
        for name, quantity in one.quantities.items():
            again = other.quantities[name].value
            if quantity.value is None or again is None:
                continue
            if not np.array_equal(quantity.value, again, equal_nan=True):
                raise SuiteError(
                    f"{self.name}: case {case.name} is random: two runs on one device differ in {name}; "
                    "take the dropout out, or say random=True"
                )

    def _placements_tried(
        self, case: Case, program: Program, usable: Mapping[str, MakeOptimizer], options: PlanOptions
    ) -> Iterator[Trial]:
        reference = compute_reference(program, case.name)
        buffers = program.buffers()
        tensors = {
            **{
                name: (tensor.ndim, kind_of(tensor))
                for name, tensor in program.tensors().items()
                if name not in buffers
            },
            **{f"grad_{name}": (v.ndim, v.dtype.kind) for name, v in reference.cotangents.items()},
        }
        for mesh in self._meshes(case, options):
            declared = {name: show(sbp) for name, sbp in self._resolve(case, mesh).items()}
            fixed = {**declared, **(options.placements or {})}
            for name in fixed:
                if name not in tensors:
                    raise SuiteError(
                        f"{self.name}: case {case.name} has no tensor {name!r} to place; it has {', '.join(tensors)}"
                    )
            most = None if options.rows is None else max(1, _ROWS * options.rows // mesh.ndim)
            rows, _ = placement_rows(
                tensors, mesh, options.full_product_up_to, options.partial, fixed, most=most
            )
            for dtype in options.dtypes:
                for row in rows:
                    placed = {name: sbp for name, sbp in row.items() if not _is_whole(sbp, mesh)}
                    for kind, chosen in _kinds(usable):
                        yield Trial(
                            self.name,
                            case.name,
                            str(mesh),
                            placed,
                            kind,
                            chosen,
                            dtype,
                            options.device,
                            "dtensor",
                        )

    def _as_declared(
        self, case: Case, program: Program, usable: Mapping[str, MakeOptimizer], options: PlanOptions
    ) -> Iterator[Trial]:
        for mesh in self._meshes(case, options):
            placed = {
                name: show(sbp)
                for name, sbp in self._resolve(case, mesh).items()
                if any(placement != B for placement in sbp)
            }
            for dtype in (LOW_DTYPE,) if case.autocast else options.dtypes:
                for kind, chosen in _kinds(usable):
                    yield Trial(
                        self.name,
                        case.name,
                        str(mesh),
                        placed,
                        kind,
                        chosen,
                        dtype,
                        options.device,
                        case.subject,
                    )

    def _resolve(self, case: Case, mesh: Mesh) -> dict[str, SBP]:
        try:
            return resolve_all(case, mesh)
        except CaseError as error:
            raise SuiteError(f"{self.name}: {error}") from error

    def _meshes(self, case: Case, options: PlanOptions) -> list[Mesh]:
        """The meshes of a case: its own, else those asked for that have its number of axes. None, with a note in
        ``skipped``, where none fits."""
        size = options.meshes[0].size
        if case.meshes:
            meshes = [parse_mesh(text) for text in case.meshes]
            fitting = [mesh for mesh in meshes if mesh.size == size]
            wanted = " or ".join(str(mesh.size) for mesh in meshes)
        elif case.is_parallel or case.axes:
            axes = len(case.axis_names)
            fitting = [mesh for mesh in options.meshes if mesh.ndim == axes] or _default_mesh(size, axes)
            wanted = f"a multiple of {2 ** (axes - 1)}"
        else:
            return list(options.meshes)
        if not fitting:
            self.skipped[case.name] = f"needs {wanted} ranks, there are {size}"
        return fitting

    # ------------------------------------------------------------------------------------------ running

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        if trial.kind != "train":
            return None
        train = self.case(trial.case).train
        if train is None:
            raise SuiteError(f"{self.name}: case {trial.case} has no training")
        return optimizers.choose(train.optimizer)[trial.options["optimizer"]]

    def subject(self, trial: Trial, rank: int, device: str) -> ParallelSubject | None:
        """What runs a trial of a case that says how it becomes parallel; None where placements are tried."""
        case = self.case(trial.case)
        if not case.is_parallel:
            return None
        if self._state is None:
            self._state = Grids(torch.device(device).type), PieceCache(rank)
        kind = SpmdSubject if case.spmd is not None else PlannedSubject
        return kind(case, rank, *self._state)

    def is_random(self, trial: Trial) -> bool:
        """Whether the values of a trial's results are not to be compared."""
        return self.case(trial.case).random


def recipe_of(case: Case) -> Recipe:
    """What a run of the case does besides."""
    train = case.train or Train()
    return Recipe(
        steps=train.steps,
        accumulate=train.accumulate,
        loss=case.loss,
        clip_norm=train.clip_norm,
        schedule=train.schedule,
        autocast=case.autocast,
        save_after=train.save_after,
    )


def resolve_all(case: Case, mesh: Mesh) -> dict[str, SBP]:
    """Every placement that the case declares, on a mesh. Raises CaseError where it does not fit."""
    found: dict[str, SBP] = {}
    for name, placed in case.placements.items():
        try:
            if isinstance(placed, str):
                found[name] = parse_sbp(placed, mesh)
            else:
                words = [placed.get(axis, "B") for axis in case.axis_names]
                found[name] = tuple(parse(word) for word in words)
        except PlacementError as error:
            raise CaseError(f"case {case.name}: {name}: {error}") from error
    return found


def _is_whole(text: str, mesh: Mesh) -> bool:
    return all(placement == B for placement in parse_sbp(text, mesh))


def _kinds(usable: Mapping[str, MakeOptimizer]) -> list[tuple[str, dict[str, str]]]:
    """A trial's kind and options: one training for each optimizer, or none."""
    return [("train", {"optimizer": label}) for label in usable] or [("forward", {})]


def _default_mesh(size: int, axes: int) -> list[Mesh]:
    """Twos, and the rest on the last axis."""
    rest, remainder = divmod(size, 2 ** (axes - 1))
    return [] if remainder or not rest else [Mesh((2,) * (axes - 1) + (rest,))]


def _without_gradients(program: Program) -> Program:
    """The same without anything that requires a gradient."""
    if program.module is not None:
        program.module.requires_grad_(False)
    return program.with_inputs(lambda name, tensor: tensor.detach())


def _describe_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple that starts with a {type(value[0]).__name__}" if value else "an empty tuple"
    return f"a {type(value).__name__}"
