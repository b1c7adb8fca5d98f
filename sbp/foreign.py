"""Runs on a subject in another interpreter, as the first rank leads them.

The ranks' workers run in that interpreter and send back what they hold as plain arrays. What is right comes from a
process beside the first rank, which has torch; the comparison is made here, out of the reach of whatever the subject
does to its own memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import launch
from sbp.culprit.find import Culprit
from sbp.placement import Array, parse_mesh
from sbp.session import Session, Verdict, WorldError
from sbp.subjects.foreign import NEIGHBOURS
from sbp.trial import Trial
from sbp.usage import UsageError
from sbp.verdict.compare import Observed, Row, compare_all
from sbp.verdict.judge import Judgement

_KEPT_CASES = 64
# How somebody names a subject of their own.
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Building a case and its reference may need to import a database first.
_PATIENCE = 180.0
# A few roundings of float32.
_COEFFICIENT_ROUNDING = 4 * 2.0**-23
_VALUES = ("wrong value", "wrong gradient", "wrong state")


@dataclass(frozen=True)
class ForeignSubject:
    """A subject that runs in another interpreter.

    Attributes:
        entry: ``module:class``; the module has a function ``offers`` as well (see docs/add-a-subject.md).
        preload: what its workers import before they are forked.
        environment: of its workers.
        waiting_files: parts of names of the files in which a worker waits for others.
    """

    entry: str
    preload: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    waiting_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Expected:
    kind: str
    value: Array | None
    dtype: str
    norm: float
    noise: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class _Alone:
    """What a subject does with a case without any distribution: why it cannot, or in what it differs from torch."""

    why_not: str = ""
    values: Mapping[str, _Expected] = field(default_factory=dict)


def find(name: str) -> ForeignSubject | None:
    """The subject of that name, or the one that ``module:Class`` names; None for anything else."""
    if name in SUBJECTS:
        return SUBJECTS[name]
    return ForeignSubject(name) if _ENTRY.fullmatch(name) else None


def settings(name: str, python: str | None, seed: int) -> launch.Settings:
    """How the workers of that subject are started: by this interpreter where no other is given."""
    subject = find(name)
    assert subject is not None
    environment = {"SBP_SUBJECT": subject.entry, **(subject.environment or {})}
    return launch.Settings(
        entry="sbp.subjects.foreign:start",
        preload=("numpy", *subject.preload),
        seed=seed,
        python=python or sys.executable,
        environment=environment,
        waiting_files=subject.waiting_files,
    )


def offers(subject: ForeignSubject, python: str) -> dict[str, Any]:
    """The names of the modules, functions and methods that a subject has, as it says itself.

    Raises UsageError where the interpreter, or the subject in it, does not start.
    """
    module = subject.entry.partition(":")[0]
    script = "import importlib, json, sys; print(json.dumps(importlib.import_module(sys.argv[1]).offers()))"
    own = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": paths}
    try:
        ended = subprocess.run(
            [python, "-c", script, module],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
    except OSError as error:
        raise UsageError(f"--subject-python {python}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise UsageError(f"--subject-python {python}: {module} did not start within 120 s") from None
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise UsageError(f"--subject-python {python}: {module} does not start there: {lines[-1]}")
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


class ForeignSession(Session):
    """A session whose workers run in another interpreter.

    Args:
        side: the process of sbp.material.
        offered: what the subject has; None if it is not asked.
        others as of Session.
    """

    def __init__(
        self, job: Any, timeout: float, side: Any, offered: Mapping[str, Any] | None, host: str = "127.0.0.1"
    ) -> None:
        super().__init__(job, timeout, host=host)
        self.side = side
        self.offered = offered
        self._materials: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._observed: list[dict[str, Observed]] = []
        self._without_distribution: dict[str, _Alone] = {}

    def _prepare(self, trial: Trial) -> None:
        case = _case_of(trial)
        material = self._material(trial)
        if case != self._prepared:
            self.job.call({"do": "prepare", "case": case, "task": material["task"]}, _PATIENCE)
            self._prepared = case

    def _request(self, trial: Trial) -> dict[str, Any]:
        self._observed = [{} for _ in range(self.job.size)]
        return {"do": "trial", "trial": trial.to_dict(), "case": _case_of(trial)}

    def _run_once(self, trial: Trial) -> Verdict:
        why = self._material(trial).get("why_not")
        if why is not None:
            record = {"type": "NotPortable", "message": why, "traceback": ""}
            return Verdict(trial, "refused", error=record)
        alone = self._alone(trial)
        if alone.why_not:
            record = {"type": "NotOnOneDevice", "message": alone.why_not, "traceback": ""}
            return Verdict(trial, "refused", error=record)
        return self._run_prepared(trial)

    def _run_prepared(self, trial: Trial) -> Verdict:
        verdict = super()._run_once(trial)
        if verdict.error is not None:
            self._prepared = ""  # the workers may be new ones
        return _on_one_device(verdict) if trial.options.get("mode") == "local" else verdict

    def _alone(self, trial: Trial) -> _Alone:
        """What the subject makes of a case without any distribution.

        Where it differs from torch by its own nature, that is one finding; what is asked of the trials is then whether
        the distributed result is the subject's own.
        """
        case = _case_of(trial)
        if trial.options.get("mode") == "local":
            return _Alone()
        if case not in self._without_distribution:
            verdict = self._run_prepared(trial.on_one_device())
            found = _Alone()
            if verdict.error is not None:
                found = _Alone(f"nor does it on one device: {verdict.error['message'].strip()[-500:]}")
            elif verdict.findings:
                wrong = {finding.quantity for finding in verdict.findings}
                expected = self._material(trial)["expected"]
                values = {
                    name: replace(expected[name], value=one.local)
                    for name, one in self._observed[0].items()
                    if name in wrong and name in expected
                }
                found = _Alone("", values)
            self._without_distribution[case] = found
        return self._without_distribution[case]

    def _material(self, trial: Trial) -> Mapping[str, Any]:
        case = _case_of(trial)
        if case not in self._materials:
            modules = None if self.offered is None else self.offered["modules"]
            self.side.send({"trial": trial.to_dict(), "modules": modules})
            found = self.side.receive(_PATIENCE)
            if found is None:
                raise WorldError(f"the reference of {case} took more than {_PATIENCE:.0f} s")
            if "expected" in found:
                found["expected"] = {name: _Expected(**due) for name, due in found["expected"].items()}
            self._materials[case] = found
            if len(self._materials) > _KEPT_CASES:
                self._materials.popitem(last=False)
        return self._materials[case]

    def _rows(self, trial: Trial, rank: int, answer: Mapping[str, Any]) -> list[Row]:
        material = self._material(trial)
        observed = {}
        for each in answer["observed"]:
            one = Observed(**each)
            observed[one.name] = one
        self._observed[rank] = observed
        expected = {**material["expected"], **self._alone(trial).values}
        around = observed.get(NEIGHBOURS)
        if around is not None and around.local is not None:
            expected[NEIGHBOURS] = _Expected("state", np.zeros_like(around.local), "int64", 0.0)
        return compare_all(
            observed,
            expected,
            parse_mesh(trial.mesh),
            rank,
            # What a mode of the subject does not show (gradients inside a graph) is not missing.
            reached="error" not in answer and trial.options.get("mode") in (None, "local"),
            random=material["task"]["random"],
            promise=material["task"]["promise"],
        )

    def _explain(self, judgement: Judgement, trial: Trial) -> Judgement:
        words = (
            "changed, though nothing of the program stands there: something wrote past the end of its tensor"
        )
        findings = [
            replace(finding, relation=words) if finding.quantity == NEIGHBOURS else finding
            for finding in judgement.findings
        ]
        return super()._explain(replace(judgement, findings=findings), trial)

    def culprit(self, verdict: Verdict) -> Culprit | None:
        """None: the other framework's functions are not those that the reference calls."""
        return None

    def _details(self, names: list[str]) -> tuple[Mapping[str, Array], list[Mapping[str, Array]]] | None:
        material = self._materials[self._prepared]
        expected: dict[str, Array] = {}
        for name in names:
            due = material["expected"].get(name)
            if due is not None and due.value is not None:
                expected[name] = due.value
        pieces: list[Mapping[str, Array]] = [
            {name: one.local for name, one in observed.items() if one.local is not None}
            for observed in self._observed
        ]
        return expected, pieces


def _on_one_device(verdict: Verdict) -> Verdict:
    """What a run without any distribution says: an error is something that the subject does not support, and a
    difference of the size of float32's rounding is noise, since frameworks keep coefficients (momentum, beta, a bias
    correction) in float32 whatever the dtype of the tensors is."""
    if verdict.verdict == "error":
        return replace(verdict, verdict="refused")
    small = all(finding.relative_error <= _COEFFICIENT_ROUNDING for finding in verdict.findings)
    values = all(finding.verdict in _VALUES for finding in verdict.findings)
    if verdict.findings and verdict.error is None and small and values:
        return replace(verdict, verdict="noise")
    return verdict


def _case_of(trial: Trial) -> str:
    """What trials with the same material have in common."""
    options = sorted(
        (name, value) for name, value in trial.options.items() if name not in ("mode", "unseeded")
    )
    return f"{trial.suite}/{trial.case}/{trial.kind}/{options}/{trial.dtype}"


ONEFLOW = ForeignSubject(
    "sbp.subjects.oneflow:OneFlowSubject",
    preload=("sbp.subjects.foreign", "sbp.subjects.oneflow", "sbp.subjects.oneflow_preload"),
    waiting_files=("/oneflow/", "/sbp/subjects/oneflow.py"),
)
SUBJECTS: dict[str, ForeignSubject] = {"oneflow": ONEFLOW}
