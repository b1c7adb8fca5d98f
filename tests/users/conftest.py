"""One job of four ranks for all tests of this folder that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbp.placement import parse_mesh
from sbp.plan import PlanOptions
from sbp.ranks import Ranks
from sbp.suites.users import UserSuite, normalise_target

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).resolve().parent / "cases"
MESHES = tuple(parse_mesh(text) for text in ("4", "2x2"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks, kept warm."""
    pool = Ranks(4, timeout=120.0)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run(ranks: Ranks) -> Callable[..., dict[str, dict[str, Any]]]:
    """Runs the trials of a case of a file: words of the id that tell them apart -> the verdict's record."""

    def run_case(path: Path, case: str, rows: int | None = 4) -> dict[str, dict[str, Any]]:
        suite = UserSuite(normalise_target(str(path)))
        trials = list(suite.plan(case, PlanOptions(MESHES, rows=rows)))
        assert trials, suite.skipped
        return {trial.id: ranks.run(trial) for trial in trials}

    return run_case
