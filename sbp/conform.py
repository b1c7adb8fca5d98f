"""``assert_conforms``: check a module from any Python process, in one line.

The module and its inputs are made here, but run on ranks that are other processes: they are sent there, and what they
are made of (classes, plan functions) is imported there from the same files.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from sbp.cases import Call, Case, CaseError
from sbp.ranks import Ranks, RanksError, failure_text, shared_ranks
from sbp.words import FAILURES

# The suite of what is checked this way, as it stands in ids.
SUITE = "assert_conforms"
_MAIN = "__main__"
_MAIN_THERE = "_sbp_main"


class ConformanceError(AssertionError):
    """What differs from one device, as text. ``records`` are the verdicts, as in a results file."""

    def __init__(self, text: str, records: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(text)
        self.records = list(records)


def assert_conforms(
    module: Any,
    inputs: Any = (),
    /,
    *,
    kwargs: Mapping[str, Any] | None = None,
    targets: Sequence[Any] = (),
    ranks: int = 4,
    mesh: str | Sequence[str] | None = None,
    dtype: str = "float64",
    level: str = "default",
    timeout: float = 60.0,
    pool: Ranks | None = None,
    **settings: Any,
) -> None:
    """Check that a module, split over ranks, computes what it computes on one device.

    The ranks are started behind the scenes by the first call and kept warm until this process ends.

    Args:
        module: a module, or a function of tensors.
        inputs: a tensor or a tuple of what it is called with.
        kwargs: keyword arguments of the call.
        targets: what the loss gets besides the output.
        ranks: how many ranks; ``mesh``: how they stand, such as ``"2x2"`` (default: as ``sbp.run`` chooses).
        dtype: of the floating tensors on both sides.
        level: how many placements are tried: ``quick``, ``default`` or ``full``.
        timeout: a trial's deadline in seconds.
        pool: the ranks to use instead of the shared ones.
        settings: ``plan``, ``spmd``, ``placements``, ``loss``, ``train`` and the others of :class:`sbp.Case`.

    Raises:
        ConformanceError (an AssertionError) where something differs, or where nothing could be compared because a plan
            is refused; CaseError for settings that make no sense; RanksError where there are no ranks.
    """
    __tracebackhide__ = True
    name = getattr(module, "__name__", type(module).__name__)
    try:
        case = Case(name, _builder(module, inputs, kwargs or {}, tuple(targets)), **settings)
    except TypeError as error:
        raise CaseError(f"assert_conforms: {error}") from None
    pool = pool or shared_ranks(ranks, timeout)
    records = run_case(case, pool, mesh, dtype, level)
    failed = [record for record in records if record["verdict"] in FAILURES]
    refused = [record for record in records if record["verdict"] == "refused"]
    if refused and (case.is_parallel or len(refused) == len(records)):
        failed += refused
    if failed:
        text = "\n\n".join(failure_text(record) for record in failed[:5])
        more = f"\n\nand {len(failed) - 5} more" if len(failed) > 5 else ""
        raise ConformanceError(f"{len(failed)} of {len(records)} trials failed\n\n{text}{more}", records)


def run_case(
    case: Case, pool: Ranks, mesh: str | Sequence[str] | None, dtype: str, level: str
) -> list[dict[str, Any]]:
    """Run all trials of a case that was made in this process; their records."""
    from sbp.lead import DTYPES, ROWS, default_meshes
    from sbp.placement import PlacementError, parse_mesh
    from sbp.plan import PlanOptions
    from sbp.suites import SuiteError
    from sbp.suites.users import UserSuite

    if dtype not in DTYPES:
        raise CaseError(f"{dtype!r} is not a dtype to test; there are: {', '.join(DTYPES)}")
    if level not in ROWS:
        raise CaseError(f"{level!r} is not a level; there are: {', '.join(ROWS)}")
    try:
        texts = default_meshes(pool.size) if mesh is None else [mesh] if isinstance(mesh, str) else list(mesh)
        meshes = tuple(parse_mesh(text) for text in texts)
    except PlacementError as error:
        raise CaseError(str(error)) from None
    for one in meshes:
        if one.size != pool.size:
            raise CaseError(f"mesh {one} has {one.size} ranks, but there are {pool.size}")
    suite = UserSuite(SUITE, {case.name: case})
    try:
        trials = list(suite.plan(case.name, PlanOptions(meshes, (dtype,), rows=ROWS[level])))
    except SuiteError as error:
        raise CaseError(str(error)) from None
    if not trials:
        raise CaseError("; ".join(suite.skipped.values()) or f"{case.name} has no trials")
    pool.define(SUITE, dump(case))
    return [{**pool.run(trial), "command": ""} for trial in trials]


class _Built:
    """A builder that returns copies of what is there already."""

    def __init__(self, made: Call) -> None:
        self.made = made

    def __call__(self) -> Call:
        import copy

        return copy.deepcopy(self.made)


def _builder(module: Any, inputs: Any, kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> _Built:
    if not callable(module):
        raise CaseError(f"assert_conforms takes a module or a function, not a {type(module).__name__}")
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return _Built(Call(module, args, dict(kwargs), targets))


# ------------------------------------------------------------------------- to the ranks and back to life


class _Pickler(pickle.Pickler):
    """Notes the files of what is only named in the pickle, so that the ranks can import it from there."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.files: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        name = getattr(value, "__module__", None)
        if isinstance(value, type) or callable(value):
            qualified = getattr(value, "__qualname__", "")
            if "<locals>" in qualified or "<lambda>" in qualified:
                raise CaseError(
                    f"{qualified} is defined inside a function; the ranks are other processes and need to import it: "
                    "define it at the top level of its file"
                )
        if isinstance(name, str) and name in sys.modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None:
                self.files[name] = os.path.abspath(file)
        return NotImplemented


def dump(case: Case) -> bytes:
    """A case as bytes for :func:`load_case`. Raises CaseError where something in it cannot be sent."""
    body, head = io.BytesIO(), io.BytesIO()
    pickler = _Pickler(body)
    try:
        pickler.dump(case)
    except CaseError:
        raise
    except Exception as error:
        raise CaseError(f"it cannot be sent to the ranks: {type(error).__name__}: {error}") from error
    if _MAIN in pickler.files and not os.path.isfile(pickler.files[_MAIN]):
        raise CaseError("what is typed in at the prompt cannot be sent to the ranks; put it in a file")
    pickle.dump((pickler.files, body.getvalue()), head)
    return head.getvalue()


def load_case(data: bytes) -> Case:
    """The inverse of :func:`dump`, in another process: only ever given what that wrote."""
    files, body = pickle.loads(data)
    for name, file in files.items():
        _ensure_module(name, file)
    loaded: Case = _Unpickler(io.BytesIO(body)).load()
    return loaded


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_MAIN_THERE if module == _MAIN else module, name)


def _ensure_module(name: str, file: str) -> None:
    """Have ``name`` importable: as usual, else from the very file that it had in the other process."""
    there = _MAIN_THERE if name == _MAIN else name
    if there in sys.modules:
        return
    if name != _MAIN:
        try:
            importlib.import_module(name)
            return
        except ImportError:
            pass
    spec = importlib.util.spec_from_file_location(there, file)
    if spec is None or spec.loader is None:
        raise RanksError(f"{name} cannot be imported from {file}")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[there] = module
    spec.loader.exec_module(module)
