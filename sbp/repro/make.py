"""From a verdict to a script that was seen to show it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from launch.supervisor import hash_seed
from sbp.material import task_of
from sbp.oracle.reference import compute_reference
from sbp.placement import parse_mesh
from sbp.portable import NotPortable, noting_constructors
from sbp.repro.failure import Failure, NoScript, failure_of
from sbp.repro.render import Material, Style, render
from sbp.repro.verify import Outcome, run_under_torchrun
from sbp.repro.warm import WarmRanks
from sbp.session import Verdict
from sbp.suites import MODULES, SuiteError, find_suite
from sbp.suites.users import normalise_target
from sbp.trial import Trial, stable_seed

# Longer than this, a file's name is of no use.
_LONGEST_NAME = 80
# The lines of a script's output that say what went wrong: an exception's, and those of a quantity that differs.
_SAYS_WHAT = re.compile(r"^(\[?rank ?\d+\]?: ?)?(\w+Error: |[\w.\[\]]+: (differs|missing|wrong|the ranks))")


@dataclass(frozen=True)
class Script:
    """A script that was run and failed as its trial did.

    Attributes:
        name: of its file.
        source: its text.
        ranks: how many it runs on.
        outcome: what it printed when it was run.
    """

    name: str
    source: str
    ranks: int
    outcome: Outcome
    material: Material
    failure: Failure
    style: Style


class Bench:
    """Where scripts are tried: warm ranks for each set of hash seeds, made when they are needed.

    Args:
        seed: of the run's hash seeds.
        timeout: for one run of a script, in seconds.
    """

    def __init__(self, seed: int = 0, timeout: float = 60.0) -> None:
        self.seed = seed
        self.timeout = timeout
        self._warm: dict[tuple[str, ...], WarmRanks] = {}

    def run(self, source: str, name: str, ranks: int, seeds: Sequence[str]) -> Outcome:
        """Run a script's text. Without ``seeds`` all ranks have the same one, so that it plays no part."""
        chosen = tuple(seeds) or ("0",) * ranks
        fitting = next((key for key in self._warm if key[:ranks] == chosen), chosen)
        if fitting not in self._warm:
            self._warm[fitting] = WarmRanks(chosen)
        try:
            return self._warm[fitting].run(source, name, ranks, self.timeout)
        except OSError:
            self._warm.pop(fitting).close()
            raise

    def close(self) -> None:
        for ranks in self._warm.values():
            ranks.close()
        self._warm.clear()

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_script(verdict: Verdict, bench: Bench) -> Script:
    """A script for a failed trial, run under torchrun and seen to fail in the same way.

    Raises NoScript with the reason where none can be made.
    """
    failure = failure_of(verdict)
    material = material_of(verdict.trial)
    name = file_name(verdict.trial.id)
    ranks = parse_mesh(material.mesh).size
    tried = []
    for style in styles(ranks, bench.seed):
        try:
            source = render(material, failure, style, title_of(verdict), name)
        except NoScript as reason:
            tried.append(str(reason))
            continue
        outcome = bench.run(source, name, ranks, style.seeds)
        if failure.shown_by(outcome.output, outcome.code):
            outcome = try_source(source, name, ranks, bench.timeout)
            if failure.shown_by(outcome.output, outcome.code):
                return Script(name, source, ranks, outcome, material, failure, style)
        tried.append(_in_words(style, outcome))
    raise NoScript("; ".join(dict.fromkeys(tried)))


def check_cases(suite: str, named: Sequence[str]) -> None:
    """Raises NoScript for a person's own cases that the person has not named: a results file is data, from wherever it
    comes, and must not choose which code is run."""
    if suite not in MODULES and suite not in {normalise_target(target) for target in named}:
        raise NoScript(f"its cases are code of your own, which is run when you name it: --cases {suite}")


def styles(ranks: int, seed: int) -> Iterator[Style]:
    """The ways to write a script, the most readable one first."""
    seeds = tuple(hash_seed(seed, rank) for rank in range(ranks))
    yield Style()
    yield Style(literal=True)
    yield Style(seeds=seeds)
    yield Style(literal=True, seeds=seeds)


def title_of(verdict: Verdict) -> str:
    """The first line of a script."""
    return f"{verdict.trial.id}: {verdict.verdict} (torch {torch.__version__})"


def try_source(source: str, name: str, ranks: int, timeout: float) -> Outcome:
    """Run a script's text under torchrun."""
    with tempfile.TemporaryDirectory(prefix="sbp-repro-") as folder:
        path = Path(folder) / name
        path.write_text(source, encoding="utf-8")
        return run_under_torchrun(path, ranks, timeout)


def material_of(trial: Trial) -> Material:
    """What a trial's script is made of. Raises NoScript where its kind of trial has none."""
    if trial.subject != "dtensor":
        raise NoScript(f"it is a trial of {trial.subject}, and scripts are written for DTensor's alone")
    if trial.dtype != "float64" or trial.device != "cpu":
        raise NoScript(f"it ran in {trial.dtype} on {trial.device}; scripts are float64 on the CPU")
    if {"unseeded", "reversed_on", "mode"} & set(trial.options):
        raise NoScript("its ranks do different things on purpose")
    try:
        suite = find_suite(trial.suite)
        if getattr(suite, "subject", lambda *_: None)(trial, 0, "cpu") is not None:
            raise NoScript("its case says itself how it becomes parallel, and is its own script")
        with noting_constructors():
            program = suite.build(trial.case, trial.dtype, "cpu")
            if program.random:
                raise NoScript("its results are random")
            make_optimizer = suite.make_optimizer(trial)
            reference = compute_reference(
                program, trial.case, make_optimizer, stable_seed("run", trial.case) % 2**31
            )
            task = task_of(program, reference, make_optimizer, None)
    except SuiteError as error:
        raise NoScript(str(error)) from error
    except NotPortable as error:
        raise NoScript(f"its calls cannot be written down one by one: {error}") from error
    return Material(task, trial.mesh, dict(trial.placements), program.keeps_placement)


def file_name(trial_id: str) -> str:
    """``repro_ID.py``, with what a file's name may have of the id."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", trial_id).strip("_")
    if len(words) > _LONGEST_NAME:
        words = f"{words[:_LONGEST_NAME]}_{stable_seed(trial_id) % 16**6:06x}"
    return f"repro_{words}.py"


def _in_words(style: Style, outcome: Outcome) -> str:
    how = "the trial's own values" if style.literal else "drawn values"
    how += " and hash seeds" if style.seeds else ""
    ended = {0: "nothing differs", None: "it does not end"}.get(outcome.code)
    if ended is None:
        said = [line for line in outcome.output.splitlines() if _SAYS_WHAT.search(line)]
        ended = f"it fails in another way ({said[-1].strip()[:100]})" if said else "it fails in another way"
    return f"with {how} {ended}"
