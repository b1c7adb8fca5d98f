"""Every planted fault is found and named, and its correct counterpart passes."""

from __future__ import annotations

import pytest

from tests.mutants.kinds import KINDS
from tests.mutants.score import measure

pytestmark = pytest.mark.distributed


def test_planted_faults_are_found_and_named() -> None:
    score = measure()
    assert score.planted >= 120
    assert score.good, [*score.misses, *score.alarms]
    assert set(score.kinds) == set(KINDS)
