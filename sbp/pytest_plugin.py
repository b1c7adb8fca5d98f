"""Cases as pytest tests: a function ``test_...`` under :func:`sbp.case` is one test for each of its trials.

    @case(plan=megatron)
    def test_mlp():
        return MLP(8, 16), torch.randn(4, 8, requires_grad=True)

The module runs on ranks of its own processes, started at the first test and kept warm; under xdist each worker has its
own. The fixture ``conforms`` is :func:`sbp.assert_conforms` on the same ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sbp.cases import Case
    from sbp.ranks import Ranks
    from sbp.trial import Trial

_LEVELS = ("quick", "default", "full")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sbp", "modules split over many ranks (sbp)")
    group.addoption("--sbp-ranks", type=int, metavar="N", help="ranks for cases that do not say (default 4)")
    group.addoption("--sbp-level", choices=_LEVELS, help="how many placements of a case are tried")
    group.addoption("--sbp-timeout", type=float, metavar="SECONDS", help="a trial's deadline (default 60)")
    group.addoption("--sbp-known", metavar="FILE", help="known failures, which are expected to fail")
    parser.addini("sbp_ranks", "ranks for cases that do not say how many", default="4")
    parser.addini(
        "sbp_level", "how many placements of a case are tried: quick, default, full", default="default"
    )
    parser.addini("sbp_timeout", "a trial's deadline in seconds", default="60")
    parser.addini("sbp_known", "file of known failures, which are expected to fail", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sbp: a trial of a case that runs on several ranks")


def _setting(config: pytest.Config, name: str) -> Any:
    given = config.getoption(f"sbp_{name}")
    return given if given is not None else config.getini(f"sbp_{name}")


def _ranks(config: pytest.Config) -> int:
    return _number(config, "ranks", int)


def _number(config: pytest.Config, name: str, kind: Callable[[Any], Any]) -> Any:
    value = _setting(config, name)
    try:
        number = kind(value)
    except ValueError:
        number = 0
    if number <= 0:
        raise pytest.UsageError(f"sbp_{name} = {value!r} is not a positive number")
    return number


def _pool(config: pytest.Config, size: int) -> Ranks:
    from sbp.ranks import shared_ranks

    return shared_ranks(size, _number(config, "timeout", float))


def pytest_sessionfinish(session: pytest.Session) -> None:
    import sys

    if "sbp.ranks" in sys.modules:
        from sbp.ranks import close_shared_ranks

        close_shared_ranks()


# -------------------------------------------------------------------------------------------- collecting


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Any:
    """A case (or list of cases) whose name is that of a test."""
    if not isinstance(collector, pytest.Module) or not collector.funcnamefilter(name):
        return None
    from sbp.cases import Case

    cases: list[Case] = []
    several = obj.values() if isinstance(obj, Mapping) else obj if isinstance(obj, (list, tuple)) else [obj]
    for item in several:
        if not isinstance(item, Case):
            return None
        cases.append(item)
    return [item for case in cases for item in _items(collector, name, case, len(cases) > 1)]


def _items(module: pytest.Module, name: str, case: Case, several: bool) -> Iterator[pytest.Item]:
    """The trials of a case, as tests of the module like those of a parametrised function."""
    from sbp.lead import ROWS, default_meshes
    from sbp.placement import PlacementError, parse_mesh
    from sbp.plan import PlanOptions
    from sbp.suites import SuiteError
    from sbp.suites.users import UserSuite, normalise_target

    suite = UserSuite(normalise_target(str(module.path)), {case.name: case})
    try:
        size = parse_mesh(case.meshes[0]).size if case.meshes else _ranks(module.config)
        meshes = tuple(parse_mesh(text) for text in default_meshes(size))
        rows = ROWS[_setting(module.config, "level")]
        trials = list(suite.plan(case.name, PlanOptions(meshes, rows=rows)))
    except (SuiteError, PlacementError) as error:
        raise module.CollectError(str(error)) from None
    if not trials:
        reasons = "; ".join(suite.skipped.values()) or "has no trials"
        raise module.CollectError(f"{suite.name}: case {case.name} {reasons}")
    for trial in trials:
        label = f"{case.name}-{test_words(trial)}" if several else test_words(trial)
        full = f"{name}[{label}]"
        # The id is given as text, so that pytest reads the part in brackets as it does when it is given one (--lf).
        yield TrialItem.from_parent(
            module, name=full, nodeid=f"{module.nodeid}::{full}", case=case, trial=trial, size=size
        )


def test_words(trial: Trial) -> str:
    """A trial in a test id: only characters that ``-k`` and shells leave alone, such as ``4-x:S0-weight:P``."""
    parts = [trial.mesh]
    parts += [f"{name}:{_plain(sbp)}" for name, sbp in trial.placements.items()]
    if trial.kind != "forward":
        parts.append(trial.kind)
    parts += [_plain(str(value)) for _, value in sorted(trial.options.items())]
    if trial.dtype != "float64":
        parts.append(trial.dtype)
    return "-".join(parts)


test_words.__test__ = False  # type: ignore[attr-defined]


def _plain(text: str) -> str:
    """``(S(0), B)`` as ``S0.B``."""
    text = re.sub(r"\((-?\w+)\)", r"\1", text.strip())
    text = text.removeprefix("(").removesuffix(")").replace(", ", ".").replace(",", ".")
    return re.sub(r"[^\w.:+-]", "", text)


class TrialItem(pytest.Item):
    """One trial as a test."""

    def __init__(self, *, case: Case, trial: Trial, size: int, **others: Any) -> None:
        super().__init__(**others)
        self.case = case
        self.trial = trial
        self.size = size
        self.add_marker(pytest.mark.sbp)
        for mark in getattr(case.build, "pytestmark", []):  # @pytest.mark... below @case
            self.own_markers.append(mark)
            self.keywords[mark.name] = mark

    def runtest(self) -> None:
        from sbp.known import load_known
        from sbp.ranks import failure_text
        from sbp.words import FAILURES

        record = _pool(self.config, self.size).run(self.trial)
        record["command"] = ""
        word = record["verdict"]
        if word not in FAILURES and not (word == "refused" and self.case.is_parallel):
            if word == "refused":
                pytest.skip(failure_text(record))
            return
        known = _setting(self.config, "known")
        reason = load_known(known).reason(record) if known else None
        if reason is not None:
            pytest.xfail(reason)
        raise TrialFailed(failure_text(record))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from sbp.known import KnownError
        from sbp.ranks import RanksError

        if isinstance(excinfo.value, (TrialFailed, RanksError, KnownError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        code = getattr(self.case.build, "__code__", None)
        return self.path, code.co_firstlineno - 1 if code is not None else None, self.name


class TrialFailed(AssertionError):
    """A trial's verdict, as text."""


@pytest.fixture
def conforms(request: pytest.FixtureRequest) -> Callable[..., None]:
    """:func:`sbp.assert_conforms` on the session's ranks: ``conforms(module, inputs, plan=...)``."""
    from sbp.conform import assert_conforms

    config = request.config

    def check(module: Any, inputs: Any = (), /, **settings: Any) -> None:
        __tracebackhide__ = True
        size = settings.pop("ranks", None) or _ranks(config)
        settings.setdefault("level", _setting(config, "level"))
        assert_conforms(module, inputs, pool=_pool(config, size), **settings)

    return check
