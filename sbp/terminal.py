"""What a person sees while a run goes on, and at its end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sbp.escape import printable
from sbp.inplace.records import FAULTS, OUTCOMES
from sbp.select import short_name
from sbp.words import FAILURES, WORDS, percent

if TYPE_CHECKING:
    from sbp.session import Verdict

_STYLES = {"pass": "green", "noise": "cyan", "refused": "blue", "no signal": "yellow"}
# A plain line this often, in seconds, where there is no terminal.
_PLAIN_INTERVAL = 10.0


def make_console(file: Any = None) -> Console:
    """A console on stdout; wide enough for a table where there is no terminal to ask."""
    file = file or sys.stdout
    width = None if file.isatty() else max(120, shutil.get_terminal_size((120, 40)).columns)
    return Console(file=file, width=width, highlight=False, soft_wrap=False)


def print_plain(console: Console, text: str, style: str = "") -> None:
    """Text from elsewhere: neither rich's markup nor what steers a terminal counts in it."""
    console.print(Text(printable(text), style=style))


class Progressing:
    """A live line on a terminal, else a plain line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.done = 0
        self.planned = 0
        self.complete = False
        self.counts: Counter[str] = Counter()
        self._begin = time.monotonic()
        self._last = self._begin
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.fields[planned]}  {task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("planning", total=None, planned="?", rate="")
            self._bar.start()

    def add(self, verdict: Verdict) -> None:
        self.done += 1
        self.counts["known" if verdict.known else verdict.verdict] += 1
        now = time.monotonic()
        rate = self.done / max(now - self._begin, 1e-9)
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=self.done,
                total=self.planned if self.complete else None,
                planned=f"{self.planned}{'' if self.complete else '+'}",
                rate=f"{rate:.0f}/s",
                description=printable(f"{self._failures()}  {verdict.trial.case[:40]}"),
            )
        elif now - self._last >= _PLAIN_INTERVAL:
            self._last = now
            more = "" if self.complete else "+"
            self.console.print(
                Text(f"{self.done}/{self.planned}{more} trials, {rate:.0f}/s, {self._failures()}")
            )

    def _failures(self) -> str:
        bad = sum(self.counts[word] for word in FAILURES)
        known = f", {self.counts['known']} known" if self.counts["known"] else ""
        return f"{bad} failure{'s' * (bad != 1)}{known}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_table(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Module (or operator) x verdict counts."""
    words = [word for word in WORDS if any(verdict.verdict == word for verdict in verdicts)]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        counts[short_name(verdict.trial.case)][verdict.verdict] += 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("case")
    table.add_column("trials", justify="right")
    for word in words:
        table.add_column(word, justify="right", style=_STYLES.get(word, "red"))
    for case, row in sorted(counts.items(), key=lambda item: item[0].lower()):
        table.add_row(
            Text(printable(case)),
            str(sum(row.values())),
            *(str(row[word]) if row[word] else "" for word in words),
        )
    console.print(table)


def group_failures(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, int]]:
    """Each distinct failure once, with the number of trials that show it: the same module, quantity and way of
    differing. The trial with the fewest placements other than B stands for the rest."""
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in verdicts:
        if not verdict.failed:
            continue
        first = verdict.findings[0] if verdict.findings else None
        key = (
            short_name(verdict.trial.case),
            verdict.verdict,
            first.quantity if first else "",
            _without_numbers(first.relation) if first else "",
        )
        groups.setdefault(key, []).append(verdict)
    result = []
    for members in groups.values():
        simplest = min(members, key=lambda verdict: (len(verdict.trial.placements), len(verdict.trial.id)))
        result.append((simplest, len(members)))
    return result


def _without_numbers(text: str) -> str:
    return "".join("#" if character.isdigit() else character for character in text)


def print_failures(
    console: Console,
    verdicts: Sequence[Verdict],
    command: Any,
    title: str,
    limit: int = 40,
    culprits: Mapping[str, str] | None = None,
) -> None:
    """Each distinct failure: where, how it differs, and the command that runs just that trial. ``culprits`` has, by
    trial id, where it goes wrong first."""
    groups = group_failures(verdicts)
    if not groups:
        return
    console.print(Text(f"\n{title}", style="bold"))
    for verdict, count in groups[:limit]:
        console.print(Text.assemble(("\n" + verdict.verdict, "bold red"), printable(f"  {verdict.trial.id}")))
        for finding in verdict.findings[:4]:
            claim = f"; claimed {finding.claimed}" if finding.claimed is not None else ""
            subject = f"{finding.quantity}: " if finding.quantity else ""
            size = f" (relative error {finding.relative_error:.2g})" if finding.relative_error else ""
            print_plain(console, f"  {subject}{finding.relation}{claim}{size}")
        if len(verdict.findings) > 4:
            console.print(Text(f"  and {len(verdict.findings) - 4} more quantities"))
        if culprits and verdict.trial.id in culprits:
            print_plain(console, f"  {culprits[verdict.trial.id]}")
        if verdict.flaky:
            console.print(Text("  flaky: it passed when it was tried again alone"))
        if count > 1:
            console.print(Text(f"  the same in {count - 1} more trial{'s' * (count > 2)} of this module"))
        print_plain(console, f"  {command(verdict.trial)}", "dim")
    if len(groups) > limit:
        console.print(Text(f"\nand {len(groups) - limit} more; --results FILE has them all"))


def print_writes(console: Console, writes: Sequence[Mapping[str, Any]], limit: int = 20) -> None:
    """The in-place writes that are silently wrong, one for each line, and how many lines there were in all."""
    if not writes:
        return
    faults: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for write in writes:
        if write["outcome"] in FAULTS:
            faults.setdefault((write["file"], write["line"], write["outcome"]), []).append(write)
    if faults:
        console.print(Text("\nIn-place writes to distributed tensors that went wrong", style="bold"))
    for (file, line, outcome), group in list(faults.items())[:limit]:
        first = group[0]
        where = f"{_shorter(file)}:{line}" + (f", in module {first['module']}" if first["module"] else "")
        console.print(
            Text.assemble(
                printable(f"\n{where}\n  "),
                (printable(outcome), "bold red"),
                printable(f": {first['source']}"),
            )
        )
        print_plain(console, f"  {first['operator']}({first['placements']})")
        if first["message"]:
            print_plain(console, f"  {first['message']}")
        if len(group) > 1:
            console.print(Text(f"  the same under {len(group) - 1} more placements or in more modules"))
        print_plain(console, f"  in {first['trial']}", "dim")
    if len(faults) > limit:
        console.print(Text(f"\nand {len(faults) - limit} more; --results FILE has them all"))
    lines = len({(write["file"], write["line"]) for write in writes})
    counts = Counter(write["outcome"] for write in writes)
    words = ", ".join(f"{counts[word]} {word}" for word in OUTCOMES if counts[word])
    console.print(
        Text(f"\nin-place writes to distributed tensors at {lines} line{'s' * (lines != 1)}: {words}")
    )


def _shorter(file: str) -> str:
    """The file relative to the working directory where it lies under it."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The closing lines."""
    counts = summary["counts"]
    words = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts.get(word))
    console.print(Text(f"\n{summary['verdicts']} trials in {summary['seconds']:.1f} s: {words}"))
    for dtype, limits in summary.get("sensitivity", {}).items():
        console.print(
            Text(
                f"{dtype}: errors over {percent(limits['median'])} would have been found in half of the trials, "
                f"over {percent(limits['largest'])} in all"
            )
        )
    if summary.get("silent"):
        console.print(
            Text(
                f"in {summary['silent']} of the trials that pass, some result is zero or mere rounding on one device "
                'as well, so that nothing could show there ("silent" in the results)'
            )
        )
    if summary["known"]:
        console.print(Text(f"{summary['known']} known failures, as expected"))
    if summary["unexpected"]:
        console.print(Text(f"{summary['unexpected']} unexpected", style="bold red"))
    else:
        console.print(Text("no unexpected failure", style="bold green"))
