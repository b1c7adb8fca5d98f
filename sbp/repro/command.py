"""``sbp repro``: stand-alone scripts for the failures of a results file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbp.escape import complain, printable
from sbp.report.merge import MergeError, read_all
from sbp.report.results import Results, ResultsError
from sbp.terminal import group_failures
from sbp.usage import OK, USAGE, Parser, UsageError, parse_time

_NAME = "sbp repro"
NOT_MADE = 1

EXAMPLES = """\
examples:
  sbp repro results.jsonl --output repros             a script for each distinct failure
  sbp repro results.jsonl --id 'modules/MSELoss(mean):8x4/4/input=S(0)'
  torchrun --nproc-per-node 4 repro_....py            then runs it: exit code 1, and both values

exit code: 0 each failure has its script; 1 some have none, with the reason; 2 bad usage or input."""


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp repro``."""
    parser = Parser(
        prog=_NAME,
        description="Write stand-alone scripts, which need torch alone, for the failures of a results file. Each is "
        "run before it is given out; one that does not fail as its trial did is not.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("results", metavar="RESULTS", help="what sbp.run --results wrote")
    add(
        "--id",
        action="append",
        metavar="ID",
        help="of this trial only (may be repeated); without it, of one trial "
        "of each distinct failure, known ones left out",
    )
    add(
        "--cases",
        action="append",
        default=[],
        metavar="TARGET",
        help="my_cases.py or package.module:function of a trial: code that a results file names is run only when it is "
        "named here too (may be repeated)",
    )
    add("--output", default=".", metavar="DIR", help="where the scripts go: --output repros (default: here)")
    add("--json", metavar="FILE", help="also write what came of it as JSON")
    add("--timeout", default="60s", metavar="TIME", help="the deadline of one run of a script (default 60s)")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = make_parser().parse_args(argv)
    try:
        return _repro(options)
    except (ResultsError, MergeError, UsageError) as error:
        return complain(_NAME, str(error), USAGE)
    except OSError as error:
        return complain(_NAME, f"{error.filename or options.output}: {error.strerror or error}", USAGE)


def _repro(options: argparse.Namespace) -> int:
    timeout = parse_time(options.timeout)
    results = read_all([options.results])
    chosen = _chosen(results, options.id)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    if not chosen:
        print("no unexpected failure: nothing to write a script for")
        return OK
    from sbp.repro.failure import NoScript
    from sbp.repro.make import Bench, check_cases, make_script

    records: list[dict[str, Any]] = []
    with Bench(results.run.seed or 0, timeout) as bench:
        for verdict in chosen:
            print(printable(f"{verdict.verdict}  {verdict.trial.id}"), flush=True)
            record: dict[str, Any] = {"id": verdict.trial.id, "verdict": verdict.verdict}
            records.append(record)
            try:
                check_cases(verdict.trial.suite, options.cases)
                script = make_script(verdict, bench)
            except NoScript as reason:
                record["reason"] = str(reason)
                print(printable(f"  no script: {reason}"), flush=True)
            else:
                path = folder / script.name
                path.write_text(script.source, encoding="utf-8")
                record |= {"script": str(path), "ranks": script.ranks}
                print(printable(f"  torchrun --nproc-per-node {script.ranks} {path}"), flush=True)
            if options.json:  # as it goes: what was made stays known if the rest is stopped
                text = json.dumps(records, indent=1, ensure_ascii=False) + "\n"
                Path(options.json).write_text(text, encoding="utf-8")
    made = sum("script" in record for record in records)
    print(f"{made} of {len(records)} failure{'s' * (len(records) != 1)} with a script", flush=True)
    return OK if made == len(records) else NOT_MADE


def _chosen(results: Results, ids: Sequence[str] | None) -> list[Any]:
    """The verdicts to write scripts for. Raises UsageError."""
    from sbp.session import Verdict

    if ids:
        by_id = {verdict.id: verdict for verdict in results.verdicts}
        for each in ids:
            if each not in by_id:
                raise UsageError(f"{results.name} has no trial {each}; sbp report shows the ids of failures")
            if not by_id[each].failed:
                raise UsageError(f"trial {each} did not fail: {by_id[each].verdict}")
        found = [by_id[each] for each in dict.fromkeys(ids)]
    else:
        found = list(results.unexpected)
    try:
        verdicts = [Verdict.from_dict(verdict.raw) for verdict in found]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{results.name} has not what a script needs: {error!r}; run it again") from error
    return verdicts if ids else [verdict for verdict, _ in group_failures(verdicts)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
