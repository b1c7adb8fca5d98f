"""``sbp merge``: puts results files together: the shards of one run, or runs in worlds of different sizes."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from sbp.escape import complain, printable
from sbp.report.files import ends_with_its_reader, opened_for_writing
from sbp.report.results import FORMAT, Results, ResultsError, Run, Summary, read
from sbp.usage import Parser

USAGE = 2


class MergeError(ValueError):
    """Files that do not belong together; one line that says which and why."""


def merge(parts: Sequence[Results], whole: bool = True) -> Results:
    """One Results of several. It is complete when every part is, and no shard is missing.

    ``whole``: whether all shards must be there; not so when runs of one shard in several worlds are put together.

    Shards come in the order of their numbers, other files in the order given. Raises MergeError where the versions
    or the seeds differ, or a trial has two different verdicts.
    """
    if not parts:
        raise MergeError("nothing to merge")
    parts = sorted(parts, key=lambda part: _shard(part.run)[0])  # stable
    first = parts[0]
    for part in parts[1:]:
        _check_same(first, part)
    kept: dict[tuple[str, str], tuple[Any, Results]] = {}
    repeated = 0
    for part in parts:
        for verdict in part.verdicts:
            if verdict.key not in kept:
                kept[verdict.key] = verdict, part
                continue
            before, where = kept[verdict.key]
            if before.verdict != verdict.verdict:
                raise MergeError(
                    f"trial {verdict.id} is {before.verdict!r} in {where.name} and {verdict.verdict!r} in "
                    f"{part.name}; merge files of one run only (sbp diff compares two)"
                )
            repeated += 1
    verdicts = tuple(verdict for verdict, _ in kept.values())
    return Results(
        " + ".join(part.name for part in parts),
        tuple(run for part in parts for run in part.runs),
        verdicts,
        tuple(item for part in parts for item in part.inplace),
        _summary(parts, verdicts, repeated, whole),
        any(part.torn for part in parts),
        sum((Counter(part.unread) for part in parts), Counter()),
    )


def _summary(parts: Sequence[Results], verdicts: Sequence[Any], repeated: int, whole: bool) -> Summary | None:
    problems = [
        f"{part.name}: {problem}" for part in parts if not _is_empty_shard(part) for problem in part.problems
    ]
    if whole:
        problems += missing_shards([run for part in parts for run in part.runs])
    summaries = [part.summary for part in parts if part.summary is not None]
    if not summaries:
        return None
    counts = Counter(verdict.verdict for verdict in verdicts)
    return Summary(
        max(sum(summary.planned for summary in summaries) - repeated, 0),
        dict(counts),
        sum(1 for verdict in verdicts if verdict.failed and verdict.known is not None),
        sum(1 for verdict in verdicts if verdict.unexpected),
        not problems,
        "; ".join(problems),
        round(sum(summary.seconds for summary in summaries), 3),
    )


def _is_empty_shard(part: Results) -> bool:
    """Whether it is a shard that had nothing to do, as happens where there are more shards than cases."""
    summary = part.summary
    return (
        bool(part.run.shard)
        and summary is not None
        and summary.complete
        and summary.planned == 0 == len(part.verdicts)
    )


def _shard(run: Run) -> tuple[int, int]:
    """``(2, 8)`` of the second shard of eight, ``(0, 0)`` of a run that is no shard."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", run.shard)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def missing_shards(runs: Iterable[Run]) -> list[str]:
    """What is missing, in a line for each size of the world that was divided into shards."""
    seen: dict[tuple[int | None, int], set[int]] = {}
    for run in runs:
        number, count = _shard(run)
        if count:
            seen.setdefault((run.world_size, count), set()).add(number)
    lines = []
    for (world, count), numbers in seen.items():
        missing = [number for number in range(1, min(count, 10_000) + 1) if number not in numbers]
        if missing:
            words = ", ".join(map(str, missing[:20])) + (" ..." if len(missing) > 20 else "")
            ranks = f" on {world} ranks" if len(seen) > 1 else ""
            lines.append(f"shard {words} of {count}{ranks} is missing")
    return lines


def _check_same(one: Results, other: Results) -> None:
    for name in ("torch", "sbp"):
        versions = one.run.versions.get(name), other.run.versions.get(name)
        if versions[0] != versions[1] and one.runs and other.runs:
            raise MergeError(
                f"{one.name} is of {name} {versions[0]}, {other.name} of {versions[1]}; "
                "merge files of one version only (sbp diff compares two)"
            )
    if one.run.seed != other.run.seed and one.runs and other.runs:
        raise MergeError(f"{one.name} has the seed {one.run.seed}, {other.name} {other.run.seed}")


def write(results: Results, file: TextIO) -> None:
    """Write a results file: the runs, the verdicts, what was seen in place, and the summary."""
    runs = [run.raw for run in results.runs] or [{"kind": "run", "format": FORMAT}]
    records = [*runs, *(verdict.raw for verdict in results.verdicts), *(item.raw for item in results.inplace)]
    if results.summary is not None:
        summary = results.summary
        records.append(
            {
                "kind": "summary",
                "planned": summary.planned,
                "verdicts": len(results.verdicts),
                "counts": dict(summary.counts),
                "known": summary.known,
                "unexpected": summary.unexpected,
                "complete": summary.complete,
                "stopped": summary.stopped,
                "seconds": summary.seconds,
            }
        )
    for record in records:
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def read_all(paths: Sequence[str]) -> Results:
    """One file, or several merged. Raises ResultsError or MergeError."""
    parts = [read(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    return merge(parts)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sbp merge",
        description="Put results files together: the shards of a run, or runs in worlds of different sizes.",
        epilog="exit code: 0 merged, and nothing is missing; 2 the files do not belong together; "
        "3 merged, but the whole is incomplete.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="shard-1.jsonl shard-2.jsonl ...")
    parser.add_argument(
        "--part", action="store_true", help="these are of one shard: do not ask for the others"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="where the whole goes: -o all.jsonl"
    )
    return parser


@ends_with_its_reader
def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = make_parser().parse_args(argv)
    try:
        if any(_same_file(options.output, path) for path in options.results):
            raise MergeError(f"{options.output} is one of the files to merge; write to another")
        results = merge([read(path) for path in options.results], whole=not options.part)
        with opened_for_writing(options.output) as file:
            write(results, file)
    except BrokenPipeError:
        raise
    except (ResultsError, MergeError, OSError) as error:
        return complain("sbp merge", str(error), USAGE)
    print(printable(f"{options.output}: {len(results.verdicts)} verdicts of {len(options.results)} files"))
    for problem in results.problems:
        complain("sbp merge", f"incomplete: {problem}", 3)
    return 0 if results.complete else 3


def _same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False
