"""Known failures: a TOML file that says which trials are expected to fail, how, and why.

    [[known]]
    pattern = "modules/MSELoss(mean)*/input=S(0)*"   # fnmatch on trial ids; or a list of them
    verdict = "wrong gradient"                       # or a list
    reason = "mse_loss divides by the elements of a shard: the gradient is too large by the number of ranks"
    link = "https://github.com/pytorch/pytorch/issues/1"   # optional, as is all below
    torch = "==2.13.*"                               # the versions that have it
    expires = 2027-01-01                             # from this day on the entry no longer counts
    quantity = "input.grad"                          # fnmatch: every finding must be about such a quantity
    subject = "dtensor"                              # the system under test
    sometimes = true                                 # may pass as well, such as what depends on a hash seed

In a pattern ``*`` also stands for ``/``; brackets are round in ids, so that ``[...]`` keeps its fnmatch meaning.

An entry is held to its word: one whose pattern matched trials of which none failed as it says *passes*, and one
that matched no trial at all is *unmatched*. Both are reported (see :class:`Usage`), so the file cannot rot.
No torch here: reports and the first rank's supervisor read the file.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from sbp import toml
from sbp.words import FAILURES, HARMLESS

SHIPPED = Path(__file__).parent / "data" / "known-torch-2.13.toml"

_KEYS = ("pattern", "verdict", "reason", "link", "torch", "expires", "quantity", "subject", "sometimes")
_WILD = re.compile(r"[*?\[]")
_MESH = re.compile(r"\d+(x\d+)*")
_DTYPE_OR_DEVICE = re.compile(r"b?float\d+|complex\d+|cuda.*")


# Longer than any such file; what never ends, such as /dev/zero, must not be read for ever.
_MOST = 16 << 20


class KnownError(ValueError):
    """A known-failures file that cannot be read; one line that says where and what to do."""


@dataclass(frozen=True)
class Pattern:
    """An fnmatch pattern, compiled; ``exact`` where it names one id; ``start`` is what stands before a wildcard."""

    text: str
    exact: bool = field(init=False)
    start: str = field(init=False, repr=False, compare=False)
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        wild = _WILD.search(self.text)
        regex = re.compile(fnmatch.translate(self.text))
        object.__setattr__(self, "start", self.text[: wild.start()] if wild else self.text)
        object.__setattr__(self, "_regex", regex)
        # What glob.escape made of an id with special characters still names that one id.
        object.__setattr__(self, "exact", _WILD.search(re.sub(r"\[[*?\[]\]", "", self.text)) is None)

    def matches(self, name: str) -> bool:
        # Most patterns fail on their first characters, which is much cheaper than a regex.
        return name.startswith(self.start) and self._regex.match(name) is not None


@dataclass(frozen=True)
class Entry:
    """One known failure.

    Attributes:
        patterns: of trial ids.
        verdicts: the words it expects.
        reason: why, in a sentence.
        link: where it is reported, or empty.
        torch: the versions of torch that have it; empty for all.
        expires: the first day on which it no longer counts.
        quantity: pattern of the quantities it is about; None for any.
        subject: pattern of the subject; None for any.
        sometimes: that it passes now and then is expected.
        number, line: its place in the file, from 1; line 0 where that is not known.
    """

    patterns: tuple[Pattern, ...]
    verdicts: tuple[str, ...]
    reason: str
    link: str = ""
    torch: SpecifierSet = field(default_factory=SpecifierSet)
    expires: date | None = None
    quantity: Pattern | None = None
    subject: Pattern | None = None
    sometimes: bool = False
    number: int = 0
    line: int = 0

    def applies_to(self, torch_version: str | None, today: date | None = None) -> bool:
        """Whether the entry counts for this torch (None: not known, then it does) on this day."""
        if self.expired(today):
            return False
        if torch_version is None or not str(self.torch):
            return True
        try:
            return self.torch.contains(Version(torch_version), prereleases=True)
        except InvalidVersion:
            return False

    def expired(self, today: date | None = None) -> bool:
        return self.expires is not None and (today or date.today()) >= self.expires

    def pattern_for(self, record: Mapping[str, Any]) -> Pattern | None:
        """The pattern that matches the record's id (and subject), whatever its verdict."""
        if self.subject is not None and not self.subject.matches(str(record.get("subject", ""))):
            return None
        name = record["id"]
        return next((pattern for pattern in self.patterns if pattern.matches(name)), None)

    def expects(self, record: Mapping[str, Any]) -> bool:
        """Whether the record's verdict and findings are as the entry says. Does not look at the id."""
        if record["verdict"] not in self.verdicts:
            return False
        if self.quantity is None:
            return True
        quantities = [finding.get("quantity", "") for finding in record.get("findings", ())]
        named = [quantity for quantity in quantities if quantity]
        return bool(named) and all(self.quantity.matches(quantity) for quantity in named)


@dataclass(frozen=True)
class Known:
    """A file of known failures.

    Attributes:
        path: where it was read from, None for no file.
        entries: in the file's order; the first that matches a verdict explains it.
        torch_version: the torch that verdicts are from unless a call says otherwise; None: not known.
    """

    path: Path | None = None
    entries: tuple[Entry, ...] = ()
    torch_version: str | None = None

    def match(self, record: Mapping[str, Any], torch_version: str | None = None) -> Entry | None:
        """The entry that explains a failing verdict record (a dictionary as the results file has it), or None.

        Records that are no failure (pass, noise, refused) match nothing.
        """
        if record["verdict"] in HARMLESS:
            return None
        version = torch_version or self.torch_version
        for entry in self.entries:
            if entry.pattern_for(record) is not None and entry.expects(record) and entry.applies_to(version):
                return entry
        return None

    def reason(self, record: Mapping[str, Any]) -> str | None:
        """The reason of the entry that explains the record, for its ``known`` field."""
        entry = self.match(record)
        return None if entry is None else entry.reason

    def where(self, entry: Entry) -> str:
        """Such as ``known.toml:12``, for messages."""
        name = self.path.name if self.path else "known failures"
        return f"{name}:{entry.line}" if entry.line else f"{name}: entry {entry.number}"


@dataclass(frozen=True)
class Stale:
    """A pattern of an entry that the results do not bear out.

    Attributes:
        problem: ``passes`` (trials matched, none failed as the entry says), ``matches nothing`` or ``expired``.
        seen: the verdicts of the trials that matched, with their number.
    """

    entry: Entry
    pattern: Pattern | None
    problem: str
    seen: Mapping[str, int] = field(default_factory=dict)

    def describe(self, known: Known) -> str:
        """One line for a person."""
        where = known.where(self.entry)
        name = self.pattern.text if self.pattern else self.entry.patterns[0].text
        expected = " or ".join(self.entry.verdicts)
        if self.problem == "expired":
            return f"{where}: {name}: expired on {self.entry.expires}; check it again and renew or remove it"
        if self.problem == "matches nothing":
            return f"{where}: {name}: matches no trial of this run; correct or remove it"
        seen = ", ".join(f"{count} {word}" for word, count in self.seen.items())
        return f"{where}: {name}: no trial is {expected} any more ({seen}); remove it (sbp known update)"


class Usage:
    """Counts which entries a run's verdicts bear out.

    >>> usage = Usage(known)                    # doctest: +SKIP
    >>> for record in verdicts: usage.add(record)
    >>> usage.stale(whole_run=True)
    """

    def __init__(self, known: Known, torch_version: str | None = None, today: date | None = None) -> None:
        self.known = known
        self._today = today
        version = torch_version or known.torch_version
        self._entries = [entry for entry in known.entries if entry.applies_to(version, today)]
        self._expired = [entry for entry in known.entries if entry.expired(today)]
        self._seen: dict[tuple[int, str], dict[str, int]] = {}
        self._borne_out: set[tuple[int, str]] = set()
        self._suites: set[str] = set()
        self._scopes: set[str] = set()

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one verdict record into account."""
        self._suites.add(str(record.get("suite") or record["id"].split("/")[0]))
        self._scopes |= _scopes(record["id"])
        for entry in self._entries:
            if entry.subject is not None and not entry.subject.matches(str(record.get("subject", ""))):
                continue
            for pattern in entry.patterns:
                if not pattern.matches(record["id"]):
                    continue
                key = (entry.number, pattern.text)
                seen = self._seen.setdefault(key, {})
                seen[record["verdict"]] = seen.get(record["verdict"], 0) + 1
                # A flaky one failed once and then passed: neither borne out nor refuted by the second try.
                if entry.expects(record) or record.get("flaky"):
                    self._borne_out.add(key)

    def stale(self, whole_run: bool) -> list[Stale]:
        """What is to be put right in the file, in its order.

        Args:
            whole_run: whether all trials were there. Of a part (``-k``, a shard, a budget) it can only be said
                of patterns that name one id whether they pass, and of none whether they match nothing.
                Patterns for a suite, mesh, dtype or device that the run did not have are not judged either.
        """
        found = [Stale(entry, None, "expired") for entry in self._expired]
        for entry in self._entries:
            for pattern in entry.patterns:
                key = (entry.number, pattern.text)
                seen = self._seen.get(key)
                if seen is None:
                    if whole_run and self._covers(pattern):
                        found.append(Stale(entry, pattern, "matches nothing"))
                elif key not in self._borne_out and not entry.sometimes and (whole_run or pattern.exact):
                    found.append(Stale(entry, pattern, "passes", seen))
        return sorted(found, key=lambda stale: stale.entry.number)

    def _covers(self, pattern: Pattern) -> bool:
        """Whether the run had the suite, mesh, dtype and device that the pattern names."""
        if not _scopes(pattern.text) <= self._scopes:
            return False
        start = pattern.start
        return any(f"{suite}/".startswith(start) or start.startswith(f"{suite}/") for suite in self._suites)


def _scopes(name: str) -> set[str]:
    """The mesh, dtype and device that an id or a pattern names, where these are not wildcards."""
    return {part for part in name.split("/") if _MESH.fullmatch(part) or _DTYPE_OR_DEVICE.fullmatch(part)}


def load(path: str | Path, torch_version: str | None = None) -> Known:
    """Read a file of known failures. Raises KnownError with one line that says where and what to do."""
    path = Path(path)
    return parse(read_text(path), path, torch_version)


def parse(text: str, path: Path, torch_version: str | None = None) -> Known:
    """What stands in the text of a file of known failures. Raises KnownError as :func:`load` does."""
    try:
        data = toml.parse(text, path)
    except toml.TomlError as error:
        raise KnownError(str(error)) from error
    return Known(path, tuple(_read_entries(data, text, path)), torch_version)


def read_text(path: Path) -> str:
    """The text of a file of known failures, not yet understood. Raises KnownError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST + 1)
        if len(content) > _MOST:
            raise KnownError(f"{path} is longer than {_MOST >> 20} MiB; known failures are a TOML file")
        text = content.decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise KnownError(f"cannot read known failures from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KnownError(f"{path} is not UTF-8 text; known failures are a TOML file") from error
    return text


def load_known(option: str | None) -> Known:
    """What ``--known`` means: a path, ``none``, or None for the file that ships with the package.

    The versions in it are held against the torch that is installed. Raises KnownError.
    """
    if option == "none":
        return Known()
    try:
        version: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if option is None and not SHIPPED.exists():
        return Known()
    return load(SHIPPED if option is None else option, version)


def _read_entries(data: Mapping[str, Any], text: str, path: Path) -> Iterable[Entry]:
    """The entries of a parsed file, checked. ``text`` is the same file, for line numbers. Raises KnownError."""
    unknown = [key for key in data if key != "known"]
    if unknown:
        raise KnownError(f"{path}: unknown key {unknown[0]!r}; each known failure is a [[known]] table")
    tables = data.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise KnownError(f"{path}: 'known' must be an array of tables; write [[known]] above each entry")
    headers = [
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if re.match(r"\s*\[\[\s*known\s*\]\]", line)
    ]
    # A header inside a multi-line string would shift the numbers: rather none than wrong ones.
    lines = headers if len(headers) == len(tables) else [0] * len(tables)
    for number, (table, line) in enumerate(zip(tables, lines, strict=True), start=1):
        where = f"{path}:{line}" if line else f"{path}: entry {number}"
        yield _read_entry(table, where, number, line)


def _read_entry(table: Mapping[str, Any], where: str, number: int, line: int) -> Entry:
    def fail(what: str) -> KnownError:
        return KnownError(f"{where}: {what}")

    def text(key: str) -> str:
        value = table.get(key, "")
        if not isinstance(value, str):
            raise fail(f"{key} must be text, not {value!r}")
        return value.strip()

    def texts(key: str) -> tuple[str, ...]:
        value = table.get(key)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
            raise fail(f"{key} must be a text or a list of texts")
        return tuple(values)

    unknown = [key for key in table if key not in _KEYS]
    if unknown:
        raise fail(f"unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    patterns = texts("pattern")
    verdicts = texts("verdict")
    for word in verdicts:
        if word not in FAILURES:
            raise fail(f"{word!r} is not a failing verdict; the words are {', '.join(FAILURES)}")
    reason = text("reason")
    if not reason:
        raise fail("a known failure needs a reason, in a sentence")
    expires = table.get("expires")
    if isinstance(expires, datetime):
        expires = expires.date()
    if isinstance(expires, str):
        try:
            expires = date.fromisoformat(expires)
        except ValueError:
            raise fail(f"expires must be a date such as 2027-01-31, not {expires!r}") from None
    if expires is not None and not isinstance(expires, date):
        raise fail(f"expires must be a date such as 2027-01-31, not {expires!r}")
    try:
        versions = SpecifierSet(text("torch"))
    except InvalidSpecifier:
        raise fail(f"torch must be a version specifier such as '==2.13.*', not {text('torch')!r}") from None
    sometimes = table.get("sometimes", False)
    if not isinstance(sometimes, bool):
        raise fail(f"sometimes must be true or false, not {sometimes!r}")
    return Entry(
        tuple(map(Pattern, patterns)),
        verdicts,
        reason,
        text("link"),
        versions,
        expires,
        Pattern(text("quantity")) if text("quantity") else None,
        Pattern(text("subject")) if text("subject") else None,
        sometimes,
        number,
        line,
    )


def describe_stale(known: Known, stale: Sequence[Stale], limit: int = 20) -> list[str]:
    """The lines for a person, at most ``limit`` and a count of the rest."""
    lines = [item.describe(known) for item in stale[:limit]]
    if len(stale) > limit:
        lines.append(f"and {len(stale) - limit} more entries")
    return lines
