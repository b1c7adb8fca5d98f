"""``sbp report``: turns results files into what people and CI read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbp._version import __version__
from sbp.escape import complain, printable
from sbp.known import KnownError, describe_stale, load_known
from sbp.report.files import ends_with_its_reader, opened_for_writing
from sbp.report.github import annotate, annotations_of, write_summary
from sbp.report.junit import results_to_junit
from sbp.report.markdown import results_to_markdown
from sbp.report.merge import MergeError, read_all
from sbp.report.results import FAILED, Results, ResultsError, apply_known
from sbp.report.sarif import results_to_sarif
from sbp.report.text import results_to_text
from sbp.usage import Parser

USAGE = 2

EXAMPLES = """\
examples:
  sbp report results.jsonl                            what came out, in the terminal
  sbp report results.jsonl --html                     results.html beside it: the page to look at
  sbp report results.jsonl --junit out.xml --sarif out.sarif --github
  sbp report results.jsonl --html --compare old.jsonl what is new, fixed and still failing
  sbp report shard-*.jsonl --known known.toml --strict

exit code, as that of sbp.run: 0 no unexpected failure; 1 unexpected failures, or with --strict a known failure
that passes or matches nothing; 2 bad usage or input; 3 the run is incomplete. --exit-zero: 0 in place of 1 and 3."""


class UsageError(ValueError):
    """Bad usage; one line that says what and what to do."""


@dataclass(frozen=True)
class Format:
    """A kind of report: the option's name, the ending of its file, and what it is good for."""

    name: str
    ending: str
    help: str


FORMATS = (
    Format("html", ".html", "one page with everything, that opens from disk"),
    Format("junit", ".xml", "JUnit XML: one test case for each case"),
    Format("sarif", ".sarif", "SARIF 2.1.0: findings with a source line, for code scanning"),
    Format("markdown", ".md", "Markdown: for a pull request or a job's summary"),
)


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp report``."""
    parser = Parser(
        prog="sbp report",
        description="Turn results files into what people and CI read.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "results", nargs="+", metavar="RESULTS", help="what sbp.run --results wrote; several are put together"
    )
    for kind in FORMATS:
        add(
            f"--{kind.name}",
            nargs="?",
            const="",
            metavar="FILE",
            help=f"{kind.help} (- for stdout; default: RESULTS with the ending {kind.ending})",
        )
    add("--github", action="store_true", help="GitHub annotations on stdout, and the job's summary")
    add("--compare", metavar="OLD", help="in the HTML: what became of every trial since: --compare old.jsonl")
    add(
        "--known",
        metavar="FILE|none",
        help="mark known failures anew: --known known.toml (default: as the run marked them)",
    )
    add("--strict", action="store_true", help="a known failure that passes or matches nothing is an error")
    add("--root", metavar="DIR", help="paths in SARIF are relative to it (default: the working directory)")
    add("--exit-zero", action="store_true", help="exit with 0 whatever came out")
    return parser


@ends_with_its_reader
def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = make_parser().parse_args(argv)
    try:
        return report(options)
    except BrokenPipeError:
        raise
    except (ResultsError, MergeError, KnownError, UsageError, OSError) as error:
        return complain("sbp report", str(error), USAGE)


def report(options: argparse.Namespace) -> int:
    """Write all that is asked for. Raises UsageError, ResultsError, MergeError, KnownError or OSError."""
    targets = output_paths(options)
    results = read_all(options.results)
    old = read_all([options.compare]) if options.compare else None
    stale: list[str] = []
    if options.known is not None:
        known = load_known(options.known)
        results, usage = apply_known(results, known)
        stale = describe_stale(known, usage.stale(is_whole(results)))
    elif options.strict:
        raise UsageError("--strict needs --known FILE")
    if not options.github and "-" not in targets.values():
        print(results_to_text(results, stale))
    writers: dict[str, Callable[[], str]] = {
        "html": lambda: _html(results, old),
        "junit": lambda: results_to_junit(results, stale if options.strict else ()),
        "sarif": lambda: json.dumps(results_to_sarif(results, __version__, options.root), indent=1) + "\n",
        "markdown": lambda: results_to_markdown(results, stale),
    }
    for name, path in targets.items():
        text = writers[name]()
        with opened_for_writing(path) as file:
            file.write(text)
    if options.github:
        for line in annotate(annotations_of(results, stale, options.strict)):
            print(line)
        write_summary(results_to_markdown(results, stale))
    for line in stale:
        print(printable(f"sbp report: {'error' if options.strict else 'warning'}: {line}"), file=sys.stderr)
    for kind, count in results.unread.items():
        print(
            printable(f"sbp report: {count} records of the unknown kind {kind!r} were left out"),
            file=sys.stderr,
        )
    if options.exit_zero:
        return 0
    return results.exit_code or (FAILED if stale and options.strict else 0)


def is_whole(results: Results) -> bool:
    """Whether nothing was deselected, so that a known failure that is not there is really gone."""
    if results.summary is None or not results.complete or results.summary.stopped:
        return False
    if results.summary.raw.get("whole") is True:
        return True
    return bool(results.runs) and all(run.raw.get("whole") is True for run in results.runs)


def output_paths(options: argparse.Namespace) -> dict[str, str]:
    """Where each report goes. Raises UsageError where that would overwrite results."""
    targets = {}
    for kind in FORMATS:
        path = getattr(options, kind.name)
        if path is None:
            continue
        if path == "":
            path = str(Path(options.results[0]).with_suffix(kind.ending))
        if path.endswith(".jsonl") or path in options.results:
            raise UsageError(
                f"--{kind.name} {path} would overwrite results; name the report, or put RESULTS first"
            )
        targets[kind.name] = path
    if list(targets.values()).count("-") + bool(options.github and "-" in targets.values()) > 1:
        raise UsageError("only one report can go to stdout")
    names = [path for path in targets.values() if path != "-"]
    if len(set(names)) < len(names):
        raise UsageError("two reports would go to the same file")
    return targets


def _html(results: Results, old: Results | None) -> str:
    # Here, since Jinja2 takes longer to import than the rest together.
    from sbp.report.html import results_to_html

    return results_to_html(results, old=old)
