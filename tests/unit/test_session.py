"""What a session makes of the ranks' answers, on a job that is played by a script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbp.results import ResultsError, ResultsWriter
from sbp.session import Session, WorldError
from sbp.trial import Trial
from sbp.verdict.compare import Observed, compare_all

TRIAL = Trial("modules", "Linear(8,12):4x8", "4", {"input": "S(0)"})
EXPECTED = np.arange(1.0, 9.0)


@dataclass
class Reply:
    rank: int
    status: str = "ok"
    value: Any = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    stack: str = ""
    seconds: float = 0.0


class Due:
    kind, value, dtype, norm = "value", EXPECTED, "float64", float(np.linalg.norm(EXPECTED))
    noise = (0.0, 0.0)


def answer(rank: int, scale: float = 1.0, error: dict[str, Any] | None = None) -> dict[str, Any]:
    piece = EXPECTED[2 * rank : 2 * rank + 2] * scale
    observed = {"output": Observed("output", "value", "S(0)", (8,), "float64", piece)}
    from sbp.placement import Mesh

    rows = compare_all(observed if not error else {}, {"output": Due}, Mesh((4,)), rank, error is None)
    value = {"rows": [row.to_list() for row in rows], "subject_seconds": 0.1, "harness_seconds": 0.01}
    if error:
        value["error"] = {"traceback": "", **error}
    return value


class PlayedJob:
    """Answers each call for a trial with what ``play`` gives for its number."""

    size = 4
    address = "127.0.0.1"

    def __init__(self, play: Callable[[int], list[Reply]], scale: float = 1.0) -> None:
        self.play, self.scale = play, scale
        self.calls: list[str] = []
        self.trials = 0
        self.dropped = 0
        self.barrier = "ok"
        self.on_new_world: Callable[[Any], None] | None = None

    def call(
        self, request: Any, timeout: float, ranks: Sequence[int] | None = None, failed: Any = None
    ) -> list[Reply]:
        self.calls.append(request["do"])
        if request["do"] == "trial":
            self.trials += 1
            return self.play(self.trials)
        if request["do"] == "open":
            return [Reply(0, value={"port": 1234})]
        if request["do"] == "details":
            values = [{"pieces": {"output": EXPECTED[2 * r : 2 * r + 2] * self.scale}} for r in range(4)]
            values[0]["expected"] = {"output": EXPECTED}
            return [Reply(rank, value=values[rank]) for rank in range(4)]
        return [Reply(rank, status=self.barrier) for rank in range(4)]

    def drop_world(self) -> None:
        self.dropped += 1


def ok(number: int = 1, scale: float = 1.0) -> list[Reply]:
    return [Reply(rank, value=answer(rank, scale)) for rank in range(4)]


def test_a_right_trial_passes_without_a_second_question() -> None:
    job = PlayedJob(ok)
    verdict = Session(job, 5).run(TRIAL)
    assert (verdict.verdict, verdict.findings, job.calls) == ("pass", [], ["prepare", "trial"])


def test_a_wrong_one_is_explained() -> None:
    job = PlayedJob(lambda number: ok(number, 4.0), scale=4.0)
    verdict = Session(job, 5).run(TRIAL)
    assert verdict.verdict == "wrong value"
    assert verdict.findings[0].relation == "4 x the reference (x the number of ranks) on every rank"
    record = verdict.to_dict("the command")
    assert record["id"] == TRIAL.id and record["command"] == "the command"
    json.dumps(record, allow_nan=False)


REFUSAL = {"type": "NotImplementedError", "message": "no strategy", "refused": True}


def test_refused_on_every_rank_is_no_failure_and_the_world_is_asked_whether_it_is_in_step() -> None:
    job = PlayedJob(lambda _: [Reply(rank, value=answer(rank, error=REFUSAL)) for rank in range(4)])
    verdict = Session(job, 5).run(TRIAL)
    assert verdict.verdict == "refused" and not verdict.failed
    assert job.calls == ["prepare", "trial", "barrier"] and job.dropped == 0
    job.barrier = "raised"
    Session(job, 5).run(TRIAL)
    assert job.dropped == 1


def test_an_error_on_one_rank_is_an_error_and_names_it() -> None:
    def play(_: int) -> list[Reply]:
        replies = [Reply(rank, "waiting", stack=f"stack {rank}") for rank in range(4)]
        replies[2] = Reply(
            2, value=answer(2, error={"type": "IndexError", "message": "boom", "refused": False})
        )
        return replies

    verdict = Session(PlayedJob(play), 5).run(TRIAL)
    assert verdict.verdict == "error"
    assert verdict.findings[0].ranks == (2,)
    assert "IndexError: boom" in verdict.findings[0].relation
    assert verdict.error is not None and verdict.error["stacks"]["0"] == "stack 0"


def test_a_refusal_on_some_ranks_only_is_an_error() -> None:
    def play(_: int) -> list[Reply]:
        return [Reply(0, value=answer(0, error=REFUSAL)), *(Reply(r, value=answer(r)) for r in (1, 2, 3))]

    assert Session(PlayedJob(play), 5).run(TRIAL).verdict == "error"


def test_what_was_found_before_an_error_comes_first() -> None:
    error = {"type": "RuntimeError", "message": "later", "refused": True, "traceback": ""}

    def play(_: int) -> list[Reply]:
        return [Reply(rank, value={**answer(rank, 4.0), "error": error}) for rank in range(4)]

    verdict = Session(PlayedJob(play, 4.0), 5).run(TRIAL)
    assert verdict.verdict == "wrong value"
    assert [finding.verdict for finding in verdict.findings] == ["wrong value", "refused"]


def test_mismatched_collectives_mean_that_the_ranks_disagree() -> None:
    message = "Detected mismatch between collectives on ranks. Rank 0 ..."
    error = {"type": "RuntimeError", "message": message, "refused": False}
    job = PlayedJob(lambda _: [Reply(rank, value=answer(rank, error=error)) for rank in range(4)])
    assert Session(job, 5).run(TRIAL).verdict == "ranks disagree"


@pytest.mark.parametrize(("status", "word"), [("hang", "hang"), ("crash", "crash")])
def test_hang_and_crash_are_tried_once_more(status: str, word: str) -> None:
    def broken(_: int) -> list[Reply]:
        replies = ok()
        replies[1] = Reply(1, status, message="killed by SIGSEGV", stack="where")
        return replies

    always = Session(PlayedJob(broken), 5).run(TRIAL)
    assert always.verdict == word and not always.flaky
    assert always.error is not None and always.error["stacks"] == {"1": "where"}
    once = Session(PlayedJob(lambda number: broken(number) if number == 1 else ok()), 5).run(TRIAL)
    assert once.verdict == word and once.flaky


def test_a_world_that_cannot_be_made_is_an_error_of_the_run() -> None:
    job = PlayedJob(ok)
    Session(job, 5)
    assert job.on_new_world is not None
    job.on_new_world(job)
    job.barrier = "crash"  # what the played job answers to "join" as well
    with pytest.raises(WorldError, match="rank 0 could not join"):
        job.on_new_world(job)


def test_results_are_whole_lines_and_a_torn_one_is_cut_when_appending(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsWriter(str(path)) as writer:
        writer.write({"kind": "run"})
        assert path.read_text() == '{"kind": "run"}\n', "a record is in the file at once"
    path.write_text(path.read_text() + '{"kind": "verd')
    with ResultsWriter(str(path), append=True) as writer:
        writer.write({"kind": "summary"})
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["run", "summary"]
    with pytest.raises(ResultsError, match="cannot write results to"):
        ResultsWriter(str(tmp_path / "missing" / "results.jsonl"))
    with pytest.raises(ValueError, match="JSON"):
        ResultsWriter(str(path)).write({"number": float("nan")})


class WatchedJob(PlayedJob):
    """Ranks that tell of a write, compared or not, as they were asked."""

    def call(self, request: Any, *arguments: Any, **others: Any) -> list[Any]:
        replies = super().call(request, *arguments, **others)
        if request["do"] == "trial":
            self.watched = [*getattr(self, "watched", []), request.get("watch")]
            for reply in replies:
                compared = request.get("watch") == "compare"
                reply.value["writes"] = [{"file": "m.py", "line": 1, "outcome": "safe", "compared": compared}]
        return replies


def test_the_writes_of_a_failed_trial_are_compared_in_a_second_run() -> None:
    job = WatchedJob(lambda number: [Reply(rank, value=answer(rank, 2.0)) for rank in range(4)], 2.0)
    verdict = Session(job, 10).run(TRIAL)
    assert job.watched == ["lines", "compare"]
    assert verdict.verdict == "wrong value"
    assert [(write["compared"], write["trial"]) for write in verdict.writes] == [(True, TRIAL.id)]
    assert "writes" not in verdict.to_dict("")


def test_the_writes_of_a_right_trial_are_not_compared() -> None:
    job = WatchedJob(lambda number: [Reply(rank, value=answer(rank)) for rank in range(4)])
    verdict = Session(job, 10).run(TRIAL)
    assert (verdict.verdict, job.watched, len(verdict.writes)) == ("pass", ["lines"], 1)


def test_the_leading_rank_imports_no_torch() -> None:
    # It would do so on every rank, before anything else, and would be in the process that no trial may take down.
    code = "import sbp.run, sbp.lead, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
