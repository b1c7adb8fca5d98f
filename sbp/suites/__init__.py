"""Where cases come from. Each suite is one module with a ``SUITE`` that follows :class:`Suite`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sbp.execute import MakeOptimizer
    from sbp.plan import PlanOptions
    from sbp.program import Program
    from sbp.trial import Trial

# Suite name -> the module that holds it. Imported when it is asked for: some need torch's test databases, which
# take seconds to import.
MODULES: dict[str, str] = {
    "modules": "sbp.suites.modules",
    "ops": "sbp.suites.operators",
    "inplace": "sbp.suites.inplace",
    "redistribute": "sbp.suites.redistribute",
    "sources": "sbp.suites.sources",
    "functions": "sbp.suites.functions",
    "optimizers": "sbp.suites.optimizer_steps",
}
# What is run without --suite, in this order.
DEFAULT = ("modules",)


def is_users(name: str) -> bool:
    """Whether a suite's name, or a target of the command line, means a user's own cases."""
    where, _, what = name.partition(":")
    if where.endswith(".py"):
        return True
    return bool(what) and all(word.isidentifier() for word in (*where.split("."), *what.split(".")))


class SuiteError(ValueError):
    """A suite or case that does not exist; says which do."""


class Suite(Protocol):
    """A source of cases."""

    @property
    def name(self) -> str: ...

    def cases(self) -> Iterable[str]:
        """The names of the cases, stable and in a stable order."""

    def build(self, case: str, dtype: str, device: str) -> Program:
        """The program of a case. The same values on every call, in every process."""

    def plan(self, case: str, options: PlanOptions) -> Iterable[Trial]:
        """The trials of a case."""

    def make_optimizer(self, trial: Trial) -> MakeOptimizer | None:
        """The optimizer of a training trial, None for any other."""


_defined: dict[str, Suite] = {}


def define_suite(name: str, suite: Suite) -> None:
    """Have :func:`find_suite` find a suite that was made in this process; takes the place of one of that name."""
    _defined[name] = suite


def find_suite(name: str) -> Suite:
    """The suite of that name, whether defined here, built in, or in a user's file. Raises SuiteError."""
    return _defined[name] if name in _defined else _find_suite(name)


@cache
def _find_suite(name: str) -> Suite:
    """The suite of that name, or the one of a user's file (``my_cases.py``, ``package.module:function``).

    Raises SuiteError.
    """
    if name not in MODULES and is_users(name):
        from sbp.suites.users import UserSuite

        return UserSuite(name)
    if name not in MODULES:
        raise SuiteError(f"there is no suite {name!r}; there are: {', '.join(MODULES)}")
    return importlib.import_module(MODULES[name]).SUITE


def skipped_cases(suite: Suite) -> Mapping[str, str]:
    """The cases that a suite left out while planning, with the reason."""
    return getattr(suite, "skipped", {})
