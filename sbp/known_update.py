"""Brings the text of a known-failures file up to date with results; what people wrote in it stays.

Values are edited through tomlkit, which keeps comments and layout. Whole entries are taken out by their lines, since
to tomlkit the comment above an entry belongs to the entry before it.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from sbp import toml
from sbp.known import Known, Pattern, Stale, Usage, parse
from sbp.report.results import Results, Verdict, group_failures
from sbp.words import FAILURES

HEADER = """\
# Known failures: trials that are expected to fail, each with the reason.
# sbp known update RESULTS brings this file up to date; comments stay.
"""


def update_text(
    text: str,
    path: Path,
    results: Results,
    whole_run: bool,
    reason: str = "",
    link: str = "",
    add: bool = True,
    remove: bool = True,
    prune: bool = False,
) -> tuple[str, list[str]]:
    """The new text of the file at ``path`` and a line about each change.

    Args:
        text: the file as it is, empty for a new one.
        whole_run: whether nothing was deselected; of a part only exact ids are said to pass.
        reason, link: of the entries that are added; without a reason how the trial differs is written.
        add, remove, prune: what may be done: add new failures; remove what passes; remove what matches nothing.

    Raises KnownError.
    """
    known = parse(text, path)
    torch = results.run.versions.get("torch")
    usage = Usage(known, torch)
    for verdict in results.verdicts:
        usage.add(verdict.raw)
    notes: list[str] = []
    if remove:
        text = _correct(text, known, usage.stale(whole_run), prune, notes)
        known = parse(text, path)
    if add:
        text = _add(text, known, results, torch, reason, link, notes)
    parse(text, path)
    return text, notes


# ------------------------------------------------------------------------------------------ what is stale


def _correct(text: str, known: Known, stale: Sequence[Stale], prune: bool, notes: list[str]) -> str:
    """Take out patterns that pass, and entries that have none left; correct verdicts that are others now."""
    document = toml.document(text, known.path or "known.toml")
    tables: Any = document.get("known", [])
    gone: dict[int, set[str]] = {}
    for item in stale:
        number = item.entry.number
        if item.problem == "expired" or item.pattern is None:
            notes.append(f"kept: {item.describe(known)}")
        elif item.problem == "matches nothing" and not prune:
            notes.append(f"kept: {item.describe(known)} (--prune removes it)")
        else:
            failing = [word for word in FAILURES if item.seen.get(word) and word not in item.entry.verdicts]
            if failing and len(item.entry.patterns) == 1:
                tables[number - 1]["verdict"] = failing[0] if len(failing) == 1 else failing
                notes.append(f"corrected: {item.pattern.text}: {' or '.join(failing)}")
                continue
            gone.setdefault(number, set()).add(item.pattern.text)
            notes.append(f"removed: {item.pattern.text}: {item.problem}")
    empty = []
    for number, patterns in gone.items():
        left = [
            pattern.text for pattern in known.entries[number - 1].patterns if pattern.text not in patterns
        ]
        if not left:
            empty.append(number)
            continue
        array = tables[number - 1]["pattern"]
        for position in reversed(range(len(array))):
            if str(array[position]) in patterns:
                del array[position]
    return _without_entries(tomlkit.dumps(document), empty, known)


def _without_entries(text: str, numbers: Iterable[int], known: Known) -> str:
    """The text without these entries and the comments right above them."""
    numbers = set(numbers)
    if not numbers:
        return text
    lines = text.splitlines(keepends=True)
    headers = [index for index, line in enumerate(lines) if re.match(r"\s*\[\[\s*known\s*\]\]", line)]
    if len(headers) != len(known.entries):
        # A header inside a text: only tomlkit can tell, at the price of a comment below the entry.
        document = tomlkit.parse(text)
        for number in sorted(numbers, reverse=True):
            del document["known"][number - 1]
        return tomlkit.dumps(document)
    starts = []
    for header in headers:
        start = header
        while start > 0 and lines[start - 1].lstrip().startswith("#"):
            start -= 1
        # A comment at the very top is about the file, not about its first entry, unless an entry is above.
        starts.append(start if start > 0 or header == 0 else header)
    kept: list[str] = lines[: starts[0]]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True), start=1):
        if number not in numbers:
            kept += lines[start:end]
            continue
        body = lines[start:end]
        # Comments that stand apart, after an empty line, head a section and stay.
        last = max(
            (i for i, line in enumerate(body) if line.strip() and not line.lstrip().startswith("#")),
            default=0,
        )
        apart = next((i for i in range(last + 1, len(body)) if not body[i].strip()), len(body))
        if any(line.strip() for line in body[apart:]):
            kept += body[apart:] if kept and kept[-1].strip() else body[apart + 1 :]
    return re.sub(r"\n{3,}", "\n\n", "".join(kept)).rstrip("\n") + "\n"


# ------------------------------------------------------------------------------------------- what is new


def _add(
    text: str, known: Known, results: Results, torch: str | None, reason: str, link: str, notes: list[str]
) -> str:
    """Append an entry for each distinct failure that none explains."""
    expired = [entry for entry in known.entries if entry.expired()]
    unexplained = [
        verdict
        for verdict in results.verdicts
        if verdict.failed
        and not verdict.flaky
        and known.match(verdict.raw, torch) is None
        and not any(entry.pattern_for(verdict.raw) and entry.expects(verdict.raw) for entry in expired)
    ]
    everyone: dict[str, list[Verdict]] = {}
    for verdict in results.verdicts:
        everyone.setdefault(head_of(verdict), []).append(verdict)
    pieces = []
    for one, members in group_failures(unexplained):
        patterns = shortest_patterns(members, everyone)
        pieces.append(_entry(one, patterns, torch, reason, link))
        notes.append(f"added: {one.verdict}: {', '.join(patterns[:3])}{' ...' if len(patterns) > 3 else ''}")
    if not pieces:
        return text
    start = (text.rstrip("\n") + "\n\n") if text.strip() else HEADER + "\n"
    return start + "\n".join(pieces)


def _entry(one: Verdict, patterns: Sequence[str], torch: str | None, reason: str, link: str) -> str:
    table = tomlkit.table()
    if len(patterns) == 1:
        table["pattern"] = patterns[0]
    else:
        array = tomlkit.array()
        array.extend(patterns)
        table["pattern"] = array.multiline(True)
    table["verdict"] = one.verdict
    table["reason"] = reason or _observed(one)
    if link:
        table["link"] = link
    if torch:
        table["torch"] = f"=={'.'.join(torch.split('+')[0].split('.')[:2])}.*"
    if one.subject:
        table["subject"] = one.subject
    document = tomlkit.document()
    tables = tomlkit.aot()
    tables.append(table)
    document.append("known", tables)
    return tomlkit.dumps(document)


def _observed(one: Verdict) -> str:
    """What was seen, in a sentence; for a person to make a reason of."""
    if not one.findings:
        return one.verdict
    first = one.findings[0]
    claimed = f", claimed {first.claimed}" if first.claimed else ""
    return f"{first.quantity + ': ' if first.quantity else ''}{first.relation or one.verdict}{claimed}"


def head_of(verdict: Verdict) -> str:
    """``suite/case``, with which the ids of all trials of the case begin."""
    return f"{verdict.suite}/{verdict.case}"


def shortest_patterns(members: Sequence[Verdict], everyone: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """As few patterns as a greedy choice finds that match these trials, and no other trial of the results.

    Args:
        members: the trials, all of one failure.
        everyone: head_of -> all trials of the results, of whatever verdict.
    """
    wanted = {verdict.key for verdict in members}
    found = []
    for head in dict.fromkeys(head_of(verdict) for verdict in members):
        left = {verdict.id for verdict in members if head_of(verdict) == head}
        candidates = []
        for text in dict.fromkeys(text for name in left for text in _candidates(head, name)):
            pattern = Pattern(text)
            matched = [verdict for verdict in everyone[head] if pattern.matches(verdict.id)]
            if len(matched) > 1 and all(verdict.key in wanted for verdict in matched):
                candidates.append((text, {verdict.id for verdict in matched}))
        while left and candidates:
            text, covered = max(candidates, key=lambda item: (len(item[1] & left), -len(item[0]), item[0]))
            if len(covered & left) < 2:
                break
            found.append(text)
            left -= covered
        found += sorted(glob.escape(name) for name in left)
    return found


def _candidates(head: str, name: str) -> Iterable[str]:
    """Patterns that could stand for the trial and others of its case: all, its mesh, one of its placements."""
    if not name.startswith(f"{head}/"):
        return
    start = glob.escape(head)
    yield f"{start}/*"
    mesh, *parts = name[len(head) + 1 :].split("/")
    if not parts:
        return
    placements, rest = parts[0], [glob.escape(part) for part in parts[1:]]
    # Not at a comma inside brackets: a=(S(0),B),b=P.
    tensors = re.split(r",(?=[^()]*=)", placements)
    for middle in ("*", mesh):
        if middle == mesh:
            yield f"{start}/{mesh}/*"
        for tensor in tensors:
            yield f"{start}/{middle}/*{glob.escape(tensor)}*"
            for part in rest:
                yield f"{start}/{middle}/*{glob.escape(tensor)}*/{part}"
        for part in rest:
            yield f"{start}/{middle}/*/{part}"
