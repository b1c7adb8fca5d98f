"""Reads results files: the one reader of the JSON lines that ``sbp.run`` writes.

Line by line, so that a run of any length is read in little memory; strict, so that a damaged file is one clear
line with the line's number and never a wrong report. Only one kind of damage is forgiven: a last line that was
cut off, which is what a killed run leaves behind. Such a file, and one without its summary, is *incomplete*.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from sbp.words import HARMLESS, WORDS

FORMAT = 1

OK, FAILED, INCOMPLETE = 0, 1, 3

# The outcomes of an in-place write that are silent faults, the gravest first.
INPLACE_FAULTS = ("lost", "changed placement", "wrong value")

# No record is as long. A file whose first line never ends, such as /dev/zero, must not be read for ever.
_LONGEST_LINE = 64 << 20

# The two marks that turn a case's name into its module's or operator's: Linear(8,12):4x8 and Linear-0:train.
_CASE_DETAIL = re.compile(r"(?<=.)[(\-:].*", re.DOTALL)


class ResultsError(ValueError):
    """A results file that cannot be read; one line that says where and why."""


@dataclass(frozen=True)
class Run:
    """What a run says of itself. ``raw`` holds the record as it was written."""

    versions: Mapping[str, str] = field(default_factory=dict)
    world_size: int | None = None
    launcher: str = ""
    subject: str = ""
    seed: int | None = None
    command: str = ""
    started: str = ""
    shard: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one quantity of a trial.

    Attributes:
        quantity: its name; empty for the trial as a whole.
        verdict: the word for it; empty where the file does not say.
        rank, ranks: the first rank on which it shows, and all of them.
        claimed, expected: the placement that the subject claims, and the one that is due where that is known.
        max_abs_error, relative_error: may be nan or infinite; None where there is no number.
        relation, detail: how it differs, in words; more lines about it.
    """

    quantity: str = ""
    verdict: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    claimed: str | None = None
    expected: str | None = None
    max_abs_error: float | None = None
    relative_error: float | None = None
    relation: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Trouble:
    """What was raised, or where each rank stood when it was killed."""

    type: str = ""
    message: str = ""
    traceback: str = ""
    stacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """Where the culprit is in the source."""

    file: str = ""
    line: int | None = None
    module: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one trial. ``noise`` is quantity -> (relative error, noise); ``raw`` the record as written."""

    id: str
    verdict: str
    suite: str = ""
    subject: str = ""
    case: str = ""
    placements: Mapping[str, str] = field(default_factory=dict)
    mesh: str = ""
    dtype: str = ""
    device: str = ""
    trial: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    known: str | None = None
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    error: Trouble | None = None
    noise: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    largest_error: float | None = None
    sensitivity: str = ""
    repro: str = ""
    origin: Origin | None = None
    flaky: bool = False
    command: str = ""
    line: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def key(self) -> tuple[str, str]:
        """What names the trial among all results: its subject and id."""
        return self.subject, self.id

    @property
    def failed(self) -> bool:
        """Whether the verdict is a failure, known or not."""
        return self.verdict not in HARMLESS

    @property
    def unexpected(self) -> bool:
        """A failure that no entry of the known failures explains."""
        return self.failed and self.known is None

    @property
    def short_name(self) -> str:
        """The module or operator that the case is about."""
        return short_name(self.case)


@dataclass(frozen=True)
class Inplace:
    """A write to a distributed tensor, as the watch saw it; see sbp.inplace.records for the words.

    ``family`` is the known part of torch that wrote (``optimizer``, ``nn.init``); empty for the user's own writes.
    """

    file: str = ""
    line: int | None = None
    operator: str = ""
    module: str = ""
    outcome: str = ""
    source: str = ""
    placements: str = ""
    message: str = ""
    count: int = 1
    trial: str = ""
    family: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_fault(self) -> bool:
        """Whether something is silently wrong."""
        return self.outcome in INPLACE_FAULTS

    @property
    def listed(self) -> bool:
        """Whether a report names it: what a known part of torch did rightly is left out."""
        return not self.family or self.is_fault


@dataclass(frozen=True)
class Summary:
    """The closing record. ``planned`` is the number of trials that were to run."""

    planned: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    known: int = 0
    unexpected: int = 0
    complete: bool = False
    stopped: str = ""
    seconds: float = 0.0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Culprit:
    """Where a failed trial goes wrong first, from a replay; it belongs to the verdict of the same subject and id."""

    subject: str
    id: str
    origin: Origin


Record = Run | Verdict | Inplace | Culprit | Summary


@dataclass(frozen=True)
class Results:
    """A whole results file, or several that were put together.

    Attributes:
        runs: the run records, the first one first (a resumed or merged file has several).
        summary: the last summary; None for a run that did not come to its end.
        torn: the last line was cut off.
        unread: kinds of records that this version does not know, with their number.
    """

    name: str = ""
    runs: tuple[Run, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    inplace: tuple[Inplace, ...] = ()
    summary: Summary | None = None
    torn: bool = False
    unread: Mapping[str, int] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        """The first run record; an empty one for an empty file."""
        return self.runs[0] if self.runs else Run()

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this is not the whole of a run; empty for a complete one."""
        found = []
        if self.torn:
            found.append("the last line is cut off: the run was killed")
        if self.summary is None:
            found.append("there is no summary: the run did not come to its end")
        elif not self.summary.complete:
            why = f": {self.summary.stopped}" if self.summary.stopped else ""
            found.append(f"the run says that it is incomplete{why}")
        elif self.summary.planned != len(self.verdicts):
            found.append(f"{self.summary.planned} trials were planned, {len(self.verdicts)} have a verdict")
        if not self.verdicts:
            found.append("there is no verdict")
        return tuple(found)

    @property
    def complete(self) -> bool:
        return not self.problems

    @property
    def counts(self) -> dict[str, int]:
        """Verdict word -> number of trials, in the order of the words."""
        counts = Counter(verdict.verdict for verdict in self.verdicts)
        return {word: counts[word] for word in WORDS if counts[word]}

    @property
    def unexpected(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.unexpected)

    @property
    def known(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.failed and verdict.known is not None)

    @property
    def seconds(self) -> float:
        """The run's wall time; the trials' own time where there is no summary."""
        return self.summary.seconds if self.summary else math.fsum(v.seconds for v in self.verdicts)

    @property
    def exit_code(self) -> int:
        """As ``sbp.run`` has it: 0 fine, 1 unexpected failures, 3 incomplete or nothing judged."""
        if not self.complete:
            return INCOMPLETE
        return FAILED if self.unexpected else OK


def short_name(case: str) -> str:
    """``Linear`` of ``Linear(8,12):4x8`` and of ``Linear-0:train``: the module or operator of a case."""
    return _CASE_DETAIL.sub("", case)


def read(path: str | Path) -> Results:
    """Read a whole results file.

    Raises ResultsError with one line: a file that cannot be read, a malformed line (with its number), a trial
    that occurs twice.
    """
    path = Path(path)
    runs: list[Run] = []
    verdicts: list[Verdict] = []
    inplace: list[Inplace] = []
    summary: Summary | None = None
    culprits: dict[tuple[str, str], Origin] = {}
    tail = Tail()
    seen: dict[tuple[str, str], int] = {}
    for record in read_records(path, tail):
        if isinstance(record, Verdict):
            first = seen.setdefault(record.key, record.line)
            if first != record.line:
                raise ResultsError(
                    f"{path}:{record.line}: trial {record.id} occurs twice, first on line {first}; "
                    "use sbp merge to put files together"
                )
            verdicts.append(record)
            summary = None  # what follows a summary, as in a resumed run, needs a new one
        elif isinstance(record, Inplace):
            inplace.append(record)
        elif isinstance(record, Culprit):
            culprits[record.subject, record.id] = record.origin
        elif isinstance(record, Run):
            runs.append(record)
            summary = None
        else:
            summary = record
    verdicts = [_with_origin(each, culprits[each.key]) if each.key in culprits else each for each in verdicts]
    return Results(
        str(path), tuple(runs), tuple(verdicts), tuple(inplace), summary, tail.torn, dict(tail.unread)
    )


def _with_origin(verdict: Verdict, origin: Origin) -> Verdict:
    return replace(verdict, origin=origin, raw={**verdict.raw, "origin": asdict(origin)})


@dataclass
class Tail:
    """What a stream of records can say only when it has been read."""

    torn: bool = False
    unread: Counter[str] = field(default_factory=Counter)


def read_records(path: str | Path, tail: Tail | None = None) -> Iterator[Record]:
    """The records of a results file, one after the other. Raises ResultsError; see :func:`read`."""
    path = Path(path)
    tail = tail if tail is not None else Tail()
    try:
        with path.open("rb") as file:
            yield from _read_stream(file, str(path), tail)
    except OSError as error:
        raise ResultsError(f"cannot read results from {path}: {error.strerror}") from error


def _read_stream(file: BinaryIO, name: str, tail: Tail) -> Iterator[Record]:
    begun = False
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
        if len(line) == _LONGEST_LINE:
            raise ResultsError(f"{name}:{number}: the line is longer than {_LONGEST_LINE >> 20} MiB")
        if line.isspace():
            continue
        try:
            data = _parse_line(line)
        except ValueError as error:
            if not line.endswith(b"\n") and (begun or line.startswith(b"{")):
                tail.torn = True  # only the last line can lack its end
                return
            raise ResultsError(f"{name}:{number}: {error}") from error
        kind = data.get("kind")
        if not begun:
            _check_first(data, f"{name}:{number}")
            begun = True
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            if not isinstance(kind, str):
                raise ResultsError(f"{name}:{number}: the record has no kind")
            tail.unread[kind] += 1
            continue
        try:
            yield reader(_Fields(data), number)
        except ValueError as error:
            raise ResultsError(f"{name}:{number}: {kind} record: {error}") from error


def _check_first(data: Mapping[str, Any], where: str) -> None:
    if data.get("kind") != "run":
        raise ResultsError(f"{where}: not a results file of sbp: its first record must be of kind 'run'")
    found = data.get("format")
    if found != FORMAT:
        raise ResultsError(f"{where}: the results have format {found!r}, this sbp reads format {FORMAT}")


class _BadNumber(ValueError):
    """A number that JSON does not have, or that no float holds."""


def _refuse_constant(text: str) -> float:
    raise _BadNumber(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # it could not be written again
        raise _BadNumber(f"{text[:20]} is too large for a number")
    return number


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("the line is not UTF-8 text") from None
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("the line is not JSON that can be read: it is nested too deeply") from None
    except _BadNumber:
        raise
    except ValueError:
        raise ValueError(
            "the line is not JSON that can be read: it has a number of too many digits"
        ) from None
    if not isinstance(data, dict):
        raise ValueError("the line is not a JSON object")
    # Half of a surrogate pair is legal in JSON but not in any file that is written from it.
    if "\\u" in text:
        data = _without_surrogates(data)
    return data


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


class _Fields:
    """A record whose fields are taken with the type that they must have. Raises ValueError naming the field."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def text(self, key: str, required: bool = False) -> str:
        value = self.data.get(key)
        if value is None and not required:
            return ""
        if not isinstance(value, str):
            raise ValueError(f"{key!r} must be text, not {_show(value)}")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.data.get(key) is None else self.text(key)

    def integer(self, key: str) -> int | None:
        value = self.data.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{key!r} must be an integer, not {_show(value)}")
        return value

    def count(self, key: str) -> int:
        value = self.integer(key)
        if value is not None and value < 0:
            raise ValueError(f"{key!r} must not be negative")
        return value or 0

    def number(self, key: str) -> float | None:
        return _number(self.data.get(key), key)

    def flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{key!r} must be true or false, not {_show(value)}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"{key!r} must be an object, not {_show(value)}")
        return value

    def texts(self, key: str) -> Mapping[str, str]:
        values = self.mapping(key)
        for name, value in values.items():
            if not isinstance(value, str):
                raise ValueError(f"{key!r} of {name!r} must be text, not {_show(value)}")
        return values

    def sequence(self, key: str) -> Sequence[Any]:
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise ValueError(f"{key!r} must be a list, not {_show(value)}")
        return value


def _number(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{key!r} must be a number, not {_show(value)}")


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _read_run(fields: _Fields, line: int) -> Run:
    world = _Fields(fields.mapping("world"))
    return Run(
        fields.texts("versions"),
        world.integer("size"),
        world.text("launcher"),
        fields.text("subject"),
        fields.integer("seed"),
        fields.text("command"),
        fields.text("started"),
        fields.text("shard"),
        fields.data,
    )


def _read_finding(data: Any) -> Finding:
    if not isinstance(data, dict):
        raise ValueError(f"each of 'findings' must be an object, not {_show(data)}")
    fields = _Fields(data)
    ranks = fields.sequence("ranks")
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise ValueError("'ranks' must be integers")
    return Finding(
        fields.text("quantity"),
        fields.text("verdict"),
        fields.integer("rank"),
        tuple(ranks),
        fields.optional_text("claimed"),
        fields.optional_text("expected"),
        fields.number("max_abs_error"),
        fields.number("relative_error"),
        fields.text("relation"),
        fields.text("detail"),
    )


def _read_noise(values: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    noise = {}
    for name, pair in values.items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"'noise' of {name!r} must be a relative error and a noise, not {_show(pair)}")
        noise[name] = (_number(pair[0], "noise"), _number(pair[1], "noise"))
    return noise


def _read_verdict(fields: _Fields, line: int) -> Verdict:
    word = fields.text("verdict", required=True)
    if word not in WORDS:
        raise ValueError(f"{word!r} is not a verdict; the words are {', '.join(WORDS)}")
    name = fields.text("id", required=True)
    if not name:
        raise ValueError("'id' is empty")
    error = _Fields(fields.mapping("error")) if fields.data.get("error") is not None else None
    origin = _Fields(fields.mapping("origin")) if fields.data.get("origin") is not None else None
    trouble = None
    if error is not None:
        trouble = Trouble(
            error.text("type"), error.text("message"), error.text("traceback"), error.texts("stacks")
        )
    sensitivity = fields.data.get("sensitivity")
    return Verdict(
        name,
        word,
        fields.text("suite"),
        fields.text("subject"),
        fields.text("case"),
        fields.texts("placements"),
        fields.text("mesh"),
        fields.text("dtype"),
        fields.text("device"),
        fields.text("trial"),
        fields.mapping("options"),
        fields.optional_text("known"),
        tuple(_read_finding(data) for data in fields.sequence("findings")),
        fields.number("seconds") or 0.0,
        trouble,
        _read_noise(fields.mapping("noise")),
        fields.number("largest_error"),
        sensitivity if isinstance(sensitivity, str) else "" if sensitivity is None else _show(sensitivity),
        fields.text("repro"),
        None
        if origin is None
        else Origin(
            origin.text("file"), origin.integer("line"), origin.text("module"), origin.text("operator")
        ),
        fields.flag("flaky"),
        fields.text("command"),
        line,
        fields.data,
    )


def _read_inplace(fields: _Fields, line: int) -> Inplace:
    placements = fields.data.get("placements")
    return Inplace(
        fields.text("file"),
        fields.integer("line"),
        fields.text("operator"),
        fields.text("module"),
        fields.text("outcome"),
        fields.text("source"),
        placements if isinstance(placements, str) else "" if placements is None else _show(placements),
        fields.text("message"),
        1 if fields.data.get("count") is None else fields.count("count"),
        fields.text("trial"),
        fields.text("family"),
        fields.data,
    )


def _read_summary(fields: _Fields, line: int) -> Summary:
    counts = fields.mapping("counts")
    for word, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise ValueError(f"'counts' of {word!r} must be an integer, not {_show(count)}")
    return Summary(
        fields.count("planned"),
        counts,
        fields.count("known"),
        fields.count("unexpected"),
        fields.flag("complete"),
        fields.text("stopped"),
        fields.number("seconds") or 0.0,
        fields.data,
    )


def _read_culprit(fields: _Fields, line: int) -> Culprit:
    origin = Origin(
        fields.text("file"), fields.integer("line"), fields.text("module"), fields.text("operator")
    )
    return Culprit(fields.text("subject"), fields.text("id"), origin)


_READERS: Mapping[str, Any] = {
    "run": _read_run,
    "verdict": _read_verdict,
    "inplace": _read_inplace,
    "culprit": _read_culprit,
    "summary": _read_summary,
}


def group_failures(verdicts: Iterable[Verdict]) -> list[tuple[Verdict, tuple[Verdict, ...]]]:
    """Each distinct failure once: the trial with the fewest placements, and all the trials that show it.

    Failures are the same where the module or operator, the verdict, the first finding's quantity and the words
    for how it differs (without their numbers) are.
    """
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.failed:
            groups.setdefault(failure_key(verdict), []).append(verdict)
    return [(min(members, key=_size), tuple(members)) for members in groups.values()]


def failure_key(verdict: Verdict) -> tuple[str, ...]:
    """What makes two failures the same one."""
    first = verdict.findings[0] if verdict.findings else Finding()
    relation = re.sub(r"\d+", "#", first.relation)
    return verdict.suite, verdict.subject, verdict.short_name, verdict.verdict, first.quantity, relation


def _size(verdict: Verdict) -> tuple[int, int]:
    return len(verdict.placements), len(verdict.id)


def apply_known(results: Results, known: Any) -> tuple[Results, Any]:
    """The results with ``known`` set anew from a file of known failures, and the file's usage.

    Args:
        known: a sbp.known.Known; the torch of the results decides which of its entries count.

    Returns: the results, and the sbp.known.Usage that says which entries they bear out.
    """
    from sbp.known import Usage

    version = results.run.versions.get("torch")
    usage = Usage(known, version)
    verdicts = []
    for verdict in results.verdicts:
        usage.add(verdict.raw)
        entry = known.match(verdict.raw, version) if verdict.failed else None
        verdicts.append(replace(verdict, known=None if entry is None else entry.reason))
    return replace(results, verdicts=tuple(verdicts)), usage
