"""What a script is to show: taken from a verdict, and cut down to the part of the run that it needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sbp.session import Verdict

# What a script says of a quantity, for each word of a finding.
KINDS = {
    "wrong value": ("differs", "missing"),
    "wrong gradient": ("differs", "missing"),
    "wrong state": ("differs", "missing"),
    "lost write": ("differs", "missing"),
    "wrong layout": ("wrong layout",),
    "ranks disagree": ("the ranks disagree",),
}
_MOST_QUANTITIES = 6
_FIRST_STEP = re.compile(r" (?:of|after) step 1$")
_MARKS = re.compile(r"\d+")


class NoScript(ValueError):
    """Why no script can be made of a failure, in one line."""


@dataclass(frozen=True)
class Wanted:
    """A quantity that differs: its name in the results and in the script, and what the script is to say of it."""

    name: str
    label: str
    kinds: tuple[str, ...]

    @property
    def is_gradient(self) -> bool:
        return ".grad" in self.label

    @property
    def is_after_a_step(self) -> bool:
        """Whether it takes an optimizer to have it."""
        return " after step " in self.label or " of step " in self.label


@dataclass(frozen=True)
class Failure:
    """What a script has to show for its verdict.

    Attributes:
        word: the verdict.
        wanted: the quantities that differ, the first one first; empty where something is raised.
        raised: ``RuntimeError: ...`` where a rank raises; its numbers do not count.
        signal: the name of the signal that ends a rank, where one does.
        hangs: whether the ranks wait for ever.
        story: the findings, in words.
    """

    word: str
    wanted: tuple[Wanted, ...] = ()
    raised: str = ""
    signal: str = ""
    hangs: bool = False
    story: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many optimizer steps are needed."""
        numbers = [re.search(r" step (\d+)", each.label) for each in self.wanted]
        return max((int(number[1]) for number in numbers if number), default=0)

    @property
    def backward(self) -> bool:
        """Whether a backward pass is needed."""
        return not self.wanted or any(each.is_gradient or each.is_after_a_step for each in self.wanted)

    def shown_by(self, output: str, code: int | None) -> bool:
        """Whether a script that printed ``output`` and ended with ``code`` (None: it was ended, as it went on and on)
        showed this failure."""
        if code == 0:
            return False
        if self.hangs:
            return code is None or "Timed out" in output or "timeout" in output.lower()
        if self.signal:
            return self.signal in output
        if self.raised:
            return _MARKS.sub("#", self.raised) in _MARKS.sub("#", output)
        first = self.wanted[0]
        return any(f"\n{first.label}: {kind}" in f"\n{output}" for kind in first.kinds)


def failure_of(verdict: Verdict) -> Failure:
    """Raises NoScript where the verdict is none that a script shows."""
    findings = [finding for finding in verdict.findings if finding.quantity]
    if verdict.verdict in ("error", "crash", "hang") or not findings:
        return _raised(verdict)
    story = [
        f"{finding.quantity}: {finding.relation or 'differs'}"
        + (f"; claimed {finding.claimed}" if finding.claimed else "")
        for finding in findings
    ]
    wanted = [_wanted(finding.quantity, finding.verdict) for finding in findings]
    first = wanted[0]
    # What comes later in the run than the first thing that is wrong shows no more than that.
    stage = (first.is_after_a_step, first.is_gradient)
    kept = [each for each in wanted if (each.is_after_a_step, each.is_gradient) == stage]
    if first.is_after_a_step:
        kept = [first]
    return Failure(verdict.verdict, tuple(kept[:_MOST_QUANTITIES]), story=tuple(story[:_MOST_QUANTITIES]))


def _wanted(name: str, word: str) -> Wanted:
    label = name
    # The first step is a forward and a backward pass; only what comes after the step itself needs the optimizer.
    if _FIRST_STEP.search(name) and (" of step " in name or not _is_updated(name)):
        label = _FIRST_STEP.sub("", name)
    if word not in KINDS:
        raise NoScript(f"{name} is {word!r}, which no script shows")
    return Wanted(name, label, KINDS[word])


def _is_updated(name: str) -> bool:
    """Whether a quantity "after step 1" is made by the optimizer: not so for buffers, as far as the name tells."""
    return not re.search(r"running_(mean|var)|num_batches_tracked", name)


def _raised(verdict: Verdict) -> Failure:
    finding = next((each for each in verdict.findings if not each.quantity), None)
    if verdict.verdict not in ("error", "crash", "hang", "ranks disagree") or finding is None:
        raise NoScript(f"the verdict is {verdict.verdict!r}, without anything that differs")
    error = verdict.error or {}
    story = (finding.relation,)
    if verdict.verdict == "crash":
        signal = re.search(r"\bSIG[A-Z]+", f"{error.get('message', '')} {finding.relation}")
        if signal is None:
            raise NoScript("a rank's process ended, but it is not known how")
        return Failure("crash", signal=signal[0], story=story)
    if verdict.verdict == "hang":
        return Failure("hang", hangs=True, story=story)
    message = str(error.get("message", "")).strip().splitlines()
    return Failure(
        verdict.verdict, raised=f"{error.get('type', '')}: {message[0][:120] if message else ''}", story=story
    )
