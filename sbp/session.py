"""One run, as the first rank leads it: takes planned trials, has all ranks run each, judges, writes.

No torch here: this runs in the process that the MPI launcher started, which no trial can take down.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sbp.culprit.find import Culprit, find_culprit
from sbp.inplace.in_trials import join
from sbp.placement import Array, parse_mesh
from sbp.trial import DEFAULT_DTYPE, Trial
from sbp.verdict.compare import Row
from sbp.verdict.judge import Finding, Judgement, judge_rows
from sbp.verdict.relation import describe_difference
from sbp.words import FAILURES, percent


class Reply(Protocol):
    """What launch says of one rank's answer; see launch.Reply."""

    rank: int
    status: str
    value: Any
    error: str
    message: str
    traceback: str
    stack: str
    seconds: float


class Job(Protocol):
    """The part of launch.Job that a session uses."""

    size: int
    address: str
    on_new_world: Callable[[Any], None] | None

    def call(
        self,
        request: Any,
        timeout: float,
        ranks: Sequence[int] | None = None,
        failed: Callable[[Any], bool] | None = None,
    ) -> list[Any]: ...

    def drop_world(self) -> None: ...


# How long the ranks may take to build a case, in seconds.
_PATIENCE = 120.0


class WorldError(RuntimeError):
    """No world of ranks could be made; nothing can be run."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one trial, as it goes into the results file.

    ``writes`` are the in-place writes that the watch tells of; they are records of their own, not part of this one.
    """

    trial: Trial
    verdict: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    error: dict[str, Any] | None = None
    known: str | None = None
    flaky: bool = False
    largest_error: float = 0.0
    noise: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sensitivity: float = 0.0
    silent: tuple[str, ...] = ()
    writes: Sequence[Mapping[str, Any]] = field(default=(), compare=False)

    @property
    def failed(self) -> bool:
        return self.verdict in FAILURES

    @staticmethod
    def from_dict(record: Mapping[str, Any], writes: Sequence[Mapping[str, Any]] = ()) -> Verdict:
        """A verdict from its record in a results file, and the in-place writes that belong to it."""
        data = {**record, "kind": record.get("trial", "forward")}
        findings = [
            Finding(
                **{
                    **{name: item[name] for name in ("verdict", "quantity", "rank", "claimed", "relation")},
                    "ranks": tuple(item["ranks"]),
                    "max_abs_error": float(item["max_abs_error"]),
                    "relative_error": float(item["relative_error"]),
                }
            )
            for item in record["findings"]
        ]
        return Verdict(
            Trial.from_dict(data),
            record["verdict"],
            findings,
            record["seconds"],
            record.get("error"),
            record.get("known"),
            record.get("flaky", False),
            record.get("largest_error", 0.0),
            {name: (pair[0], pair[1]) for name, pair in record.get("noise", {}).items()},
            _number(record.get("sensitivity")),
            tuple(record.get("silent", ())),
            writes,
        )

    def to_dict(self, command: str) -> dict[str, Any]:
        trial = self.trial
        record: dict[str, Any] = {
            "kind": "verdict",
            "id": trial.id,
            "suite": trial.suite,
            "subject": trial.subject,
            "case": trial.case,
            "placements": dict(trial.placements),
            "mesh": trial.mesh,
            "dtype": trial.dtype,
            "device": trial.device,
            "trial": trial.kind,
            "verdict": self.verdict,
            "known": self.known,
            "findings": [finding.to_dict() for finding in self.findings],
            "largest_error": self.largest_error,
            "seconds": round(self.seconds, 6),
        }
        if trial.options:
            record["options"] = dict(trial.options)
        if self.error is not None:
            record["error"] = self.error
        if self.flaky:
            record["flaky"] = True
        if self.noise:
            record["noise"] = {name: list(pair) for name, pair in self.noise.items()}
        if self.sensitivity:
            record["sensitivity"] = f"errors over {percent(self.sensitivity)} would have been found"
        if self.silent:
            record["silent"] = list(self.silent)
        if self.verdict != "pass":
            record["command"] = command
        return record


@dataclass
class Timing:
    """Where the time of the trials went, in seconds; the subject's and the harness's as the slowest rank had it.
    ``preparing`` is building cases and their references, once for all trials of a case."""

    preparing: float = 0.0
    subject: float = 0.0
    harness: float = 0.0
    wall: float = 0.0


class Session:
    """Runs trials on the ranks of a job.

    Args:
        job: the ranks.
        timeout: a trial's deadline in seconds.
        backend: of torch.distributed.
        host: where the first rank's rendezvous listens; where all ranks reach it, without.
        watch: look for in-place writes to distributed tensors while the trials run.
    """

    def __init__(
        self, job: Job, timeout: float, backend: str = "gloo", host: str | None = None, watch: bool = True
    ) -> None:
        self.job = job
        self.watch: str | None = "lines" if watch else None
        self.timeout = timeout
        self.backend = backend
        self.host = host or job.address
        self.timing = Timing()
        self.worlds = 0
        self._prepared = ""
        job.on_new_world = self._make_world

    def _make_world(self, job: Job) -> None:
        """Have the fresh workers become one torch.distributed world."""
        self.worlds += 1
        self._prepared = ""
        # The subject's own time-out is longer than the trial's deadline, which then decides alone.
        request = {"do": "open", "host": self.host, "timeout": self.timeout + 30}
        [opened] = job.call(request, 60, ranks=[0])
        if opened.status != "ok":
            raise WorldError(f"the first rank could not open a rendezvous: {opened.message or opened.status}")
        request.update(do="join", port=opened.value["port"], backend=self.backend)
        for reply in job.call(request, 120):
            if reply.status != "ok":
                raise WorldError(
                    f"rank {reply.rank} could not join the world: {reply.message or reply.status}"
                    f"\n{reply.traceback or reply.stack}"
                )

    def run(self, trial: Trial) -> Verdict:
        """Run one trial on all ranks and judge it. A rank's fault costs the trial its verdict and no more.

        A trial that ended as ``hang`` or ``crash`` is run once more in a fresh world; if it then passes, it is
        ``flaky``.
        """
        verdict = self._run_once(trial)
        if verdict.verdict in ("hang", "crash"):
            again = self._run_once(trial)
            if again.verdict not in FAILURES:
                return replace(verdict, flaky=True)
        elif verdict.failed and verdict.writes:
            return replace(verdict, writes=self._compare_writes(trial) or verdict.writes)
        return verdict

    def _compare_writes(self, trial: Trial) -> Sequence[Mapping[str, Any]]:
        """The writes of a failed trial once more, each compared with its out-of-place form, so that the line that
        went wrong is named. The verdict is that of the trial as it is, which was without comparisons."""
        usual, self.watch = self.watch, "compare"
        try:
            return self._run_once(trial).writes
        finally:
            self.watch = usual

    def _run_once(self, trial: Trial) -> Verdict:
        begin = time.monotonic()
        self._prepare(trial)
        replies = self.job.call(self._request(trial), self.timeout, failed=lambda answer: "error" in answer)
        verdict = self._judge(trial, replies)
        if verdict.error is not None and all(reply.status == "ok" for reply in replies):
            self._check_world()
        if any(reply.status == "ok" and reply.value.get("changed") for reply in replies):
            # What this case changed in its processes must not reach the next one.
            self.job.drop_world()
        seconds = time.monotonic() - begin
        self.timing.wall += seconds
        told = [reply.value.get("writes", ()) for reply in replies if reply.status == "ok"]
        return replace(verdict, seconds=seconds, writes=join(told, trial.id))

    def _request(self, trial: Trial) -> dict[str, Any]:
        request = {"do": "trial", "trial": trial.to_dict()}
        return {**request, "watch": self.watch} if self.watch is not None else request

    def culprit(self, verdict: Verdict) -> Culprit | None:
        """The step at which a failed trial goes wrong first, from a replay; None where none is seen."""
        trial, findings = verdict.trial, [finding for finding in verdict.findings if finding.quantity]
        if not findings or trial.dtype != DEFAULT_DTYPE:
            return None
        self._prepare(trial)

        def ask(request: dict[str, Any]) -> list[Any] | None:
            replies = self.job.call(request, self.timeout)
            return [reply.value for reply in replies] if all(r.status == "ok" for r in replies) else None

        found = find_culprit(ask, trial.to_dict(), parse_mesh(trial.mesh), findings[0])
        # What the case changed in its processes must not reach the next one.
        self.job.drop_world()
        return found

    def _prepare(self, trial: Trial) -> None:
        """Have the ranks build the case and its reference first: what that takes (a database to import, a large
        model) is not the subject's time. What goes wrong here goes wrong again in the trial, and is judged there."""
        case = f"{trial.suite}/{trial.case}/{trial.kind}/{sorted(trial.options.items())}/{trial.dtype}"
        if case != self._prepared:
            begin = time.monotonic()
            self.job.call({"do": "prepare", "trial": trial.to_dict()}, max(self.timeout, _PATIENCE))
            self._prepared = case
            self.timing.preparing += time.monotonic() - begin

    def _judge(self, trial: Trial, replies: Sequence[Reply]) -> Verdict:
        mesh = parse_mesh(trial.mesh)
        answers = {reply.rank: reply.value for reply in replies if reply.status == "ok"}
        if answers:
            self.timing.subject += max(answer["subject_seconds"] for answer in answers.values())
            self.timing.harness += max(answer["harness_seconds"] for answer in answers.values())
        rows = [
            self._rows(trial, rank, answers[rank]) if rank in answers else [] for rank in range(mesh.size)
        ]
        judgement = judge_rows(rows, mesh)
        error = _error_of(replies, answers)
        if error is None:
            if judgement.findings:
                judgement = self._explain(judgement, trial)
            return _verdict(trial, judgement.verdict, judgement)
        word = error["verdict"]
        trouble = Finding(word, "", error["rank"], tuple(error["ranks"]), relation=error["summary"])
        first = word in ("hang", "crash") or not judgement.findings
        if not first:
            # What the comparison found before the error is nearer to the cause than the error.
            if all(reply.status == "ok" for reply in replies):
                judgement = self._explain(judgement, trial)
            word = judgement.verdict
        # Where a rank's piece went with its worker, that it differs is all that is known of how.
        rest = [replace(found, relation=found.relation or "differs") for found in judgement.findings]
        findings = [trouble, *rest] if first else [*rest, trouble]
        return _verdict(trial, word, replace(judgement, findings=findings), error["record"])

    def _rows(self, trial: Trial, rank: int, answer: Mapping[str, Any]) -> list[Row]:
        """The comparison of one rank's pieces, from its answer."""
        return [Row.from_list(values) for values in answer["rows"]]

    def _check_world(self) -> None:
        """After an error on some rank: whether the ranks are still in step. If not, the world is dropped."""
        if any(reply.status != "ok" for reply in self.job.call({"do": "barrier"}, 5.0)):
            self.job.drop_world()

    def _explain(self, judgement: Judgement, trial: Trial) -> Judgement:
        """Add to each finding how it differs, in words, from the ranks' pieces."""
        names = [finding.quantity for finding in judgement.findings if not finding.relation]
        if not names:
            return judgement
        details = self._details(names)
        if details is None:
            return judgement
        expected, pieces_by_rank = details
        mesh = parse_mesh(trial.mesh)
        findings = []
        for finding in judgement.findings:
            if not finding.relation and finding.quantity in expected:
                pieces = [pieces.get(finding.quantity) for pieces in pieces_by_rank]
                whose = parse_mesh(finding.mesh) if finding.mesh is not None else mesh
                words = describe_difference(pieces, expected[finding.quantity], finding.claimed, whose)
                finding = replace(finding, relation=words)
            findings.append(finding)
        return replace(judgement, findings=findings)

    def _details(self, names: list[str]) -> tuple[Mapping[str, Array], list[Mapping[str, Array]]] | None:
        """The expected values of the named quantities of the last trial and each rank's pieces; None where a rank
        does not answer."""
        replies = self.job.call({"do": "details", "names": names}, self.timeout)
        if any(reply.status != "ok" for reply in replies):
            return None
        return replies[0].value["expected"], [reply.value["pieces"] for reply in replies]


def _verdict(trial: Trial, word: str, judgement: Judgement, error: dict[str, Any] | None = None) -> Verdict:
    return Verdict(
        trial,
        word,
        judgement.findings,
        error=error,
        largest_error=judgement.largest_error,
        noise=judgement.noise,
        sensitivity=judgement.sensitivity,
        silent=judgement.silent,
    )


def _number(words: Any) -> float:
    """The number in what :meth:`Verdict.to_dict` wrote of the sensitivity."""
    found = re.search(r"([\d.e+-]+) %", words) if isinstance(words, str) else None
    return float(found[1]) / 100 if found else 0.0


def _error_of(replies: Sequence[Reply], answers: Mapping[int, Any]) -> dict[str, Any] | None:
    """What went wrong on some rank, None if nothing did: the verdict's word, a line about it, and the record."""
    raised = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
    broken = {reply.rank: reply for reply in replies if reply.status != "ok"}
    if not raised and not broken:
        return None
    size = len(replies)
    stacks = {str(rank): reply.stack for rank, reply in broken.items() if reply.stack}
    crashed = [rank for rank, reply in broken.items() if reply.status == "crash"]
    hung = [rank for rank, reply in broken.items() if reply.status == "hang"]
    harness = [rank for rank, reply in broken.items() if reply.status == "raised"]
    if crashed:
        first = broken[crashed[0]]
        record = {"type": "crash", "message": first.message, "traceback": "", "stacks": stacks}
        return _problem("crash", crashed, size, first.message, record)
    if harness:
        reply = broken[harness[0]]
        record = {"type": reply.error, "message": reply.message, "traceback": reply.traceback}
        return _problem("error", harness, size, f"{reply.error}: {_first_line(reply.message)}", record)
    if raised:
        # Ranks that merely wait for one that raised are not at fault.
        ranks = sorted(raised)
        first_error = raised[ranks[0]]
        refused = len(ranks) == size and all(error["refused"] for error in raised.values())
        record = {key: first_error[key] for key in ("type", "message", "traceback")}
        if stacks:
            record["stacks"] = stacks
        summary = f"{first_error['type']}: {_first_line(first_error['message'])}"
        words = {(error["type"], error["message"]) for error in raised.values()}
        if any("Detected mismatch between collectives" in error["message"] for error in raised.values()):
            return _problem("ranks disagree", ranks, size, summary, record)
        if len(ranks) < size and not hung:
            summary += " (the others went on)"
        elif len(words) > 1:
            summary += " (the ranks' errors differ)"
        return _problem("refused" if refused else "error", ranks, size, summary, record)
    finished = [reply.rank for reply in replies if reply.status == "ok"]
    first = broken[hung[0]] if hung else next(iter(broken.values()))
    summary = first.message or "no answer before the deadline"
    if finished and "finished" not in summary:
        summary += f"; rank{'s' if len(finished) > 1 else ''} {', '.join(map(str, finished))} finished"
    record = {"type": "hang", "message": summary, "traceback": "", "stacks": stacks}
    return _problem("hang", sorted(broken), size, summary, record)


def _problem(
    verdict: str, ranks: Sequence[int], size: int, summary: str, record: dict[str, Any]
) -> dict[str, Any]:
    where = "every rank" if len(ranks) == size else f"rank {', '.join(map(str, ranks))}"
    return {
        "verdict": verdict,
        "rank": ranks[0],
        "ranks": list(ranks),
        "summary": f"{summary}, on {where}",
        "record": record,
    }


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "(no message)"


def planned_trials(side: Any, patience: float) -> Iterator[Trial | dict[str, Any]]:
    """The trials as the planning process sends them; at the end its closing message.

    Args:
        side: the connection to it.
        patience: how many seconds it may stay silent.

    Raises WorldError where it died or fell silent.
    """
    while True:
        message = side.receive(patience)
        if message is None:
            raise WorldError(f"the planner said nothing for {patience:.0f} s")
        if "trials" in message:
            yield from (Trial.from_dict(data) for data in message["trials"])
        else:
            yield message
            return
