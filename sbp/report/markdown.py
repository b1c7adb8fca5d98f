"""A run as Markdown: the job's summary on GitHub, a comment on a pull request, a page in docs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from sbp.report.junit import describe_finding
from sbp.report.results import Results, Verdict, group_failures
from sbp.words import FAILURES, WORDS

# Beside every colour stands a sign and the word itself.
SIGNS = {
    "pass": "✅",
    "noise": "≈",
    "no signal": "∅",
    "refused": "🚫",
    "crash": "💥",
    "hang": "⏳",
    "error": "⚠️",
}
_FAILED_SIGN = "❌"
_LONGEST_LINE = 400


def code(text: str) -> str:
    """Text as a code span that nothing in it can end; safe in a table's cell."""
    text = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", text)[:_LONGEST_LINE] or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text[0] in "` " or text[-1] in "` " else ""
    # Tables split at every bar, also in code.
    return f"{fence}{pad}{text.replace('|', chr(92) + '|')}{pad}{fence}"


def plain(text: str) -> str:
    """Text as text: no markup, HTML, link or mention comes of it."""
    text = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", text)[:_LONGEST_LINE]
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@\u200b")
    return re.sub(r"([\\`*_{}\[\]()#+!|~$-])", r"\\\1", text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """The lines of a table; the columns numbered ``right`` are aligned to the right."""
    columns = set(right)
    rule = ["--:" if number in columns else "---" for number in range(len(header))]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def results_to_markdown(results: Results, stale: Sequence[str] = ()) -> str:
    """The whole report: what came out, each distinct failure once, and counts for each module or operator."""
    lines = [f"## {headline_of(results)}", ""]
    lines += [f"> [!CAUTION]\n> The run is not complete: {plain(problem)}\n" for problem in results.problems]
    lines += [facts_of(results), ""]
    counts = results.counts
    lines += table(["", "verdict", "trials"], ([sign(word), word, str(counts[word])] for word in counts), [2])
    unexpected = group_failures(results.unexpected)
    if unexpected:
        lines += ["", f"### Failures ({len(unexpected)} distinct, {len(results.unexpected)} trials)", ""]
        for worst, members in unexpected:
            lines += _failure(worst, len(members))
    if stale:
        lines += ["", "### Known failures to put right", ""]
        lines += [f"- {plain(line)}" for line in stale]
    known = group_failures(results.known)
    if known:
        lines += ["", f"<details><summary>Known failures ({len(results.known)} trials)</summary>", ""]
        rows = (
            [code(one.short_name), one.verdict, str(len(members)), plain(one.known or "")]
            for one, members in known
        )
        lines += [*table(["module or operator", "verdict", "trials", "reason"], rows, [2]), "", "</details>"]
    lines += ["", "<details><summary>Counts for each module or operator</summary>", ""]
    lines += [*counts_table(results.verdicts), "", "</details>", ""]
    return "\n".join(lines)


def headline_of(results: Results) -> str:
    """What came out, in a line."""
    if not results.complete:
        return f"{_FAILED_SIGN} sbp: incomplete run, {len(results.verdicts)} verdicts"
    if results.unexpected:
        count = len(results.unexpected)
        return f"{_FAILED_SIGN} sbp: {count} unexpected failure{'s' * (count != 1)} in {len(results.verdicts)} trials"
    known = f", {len(results.known)} known failures" if results.known else ""
    return f"{SIGNS['pass']} sbp: no unexpected failure in {len(results.verdicts)} trials{known}"


def facts_of(results: Results) -> str:
    """Versions, ranks, time and command, in a line."""
    run = results.run
    facts = [
        f"{name} {version}" for name, version in run.versions.items() if name in ("torch", "sbp", "python")
    ]
    if run.world_size:
        facts.append(f"{run.world_size} ranks" + (f" under {run.launcher}" if run.launcher else ""))
    facts.append(f"{results.seconds:.1f} s")
    words = ", ".join(plain(fact) for fact in facts)
    return words + (f", {code(run.command)}" if run.command else "")


def sign(word: str) -> str:
    return SIGNS.get(word, _FAILED_SIGN)


def _failure(verdict: Verdict, count: int) -> list[str]:
    again = f", and {count - 1} more trials" if count > 1 else ""
    flaky = ", flaky" if verdict.flaky else ""
    lines = [f"- {sign(verdict.verdict)} **{verdict.verdict}**{flaky} {code(verdict.id)}{again}"]
    lines += [f"  - {plain(describe_finding(finding))}" for finding in verdict.findings[:4]]
    if len(verdict.findings) > 4:
        lines.append(f"  - and {len(verdict.findings) - 4} more quantities")
    if verdict.origin and verdict.origin.file:
        lines.append(f"  - at {code(f'{verdict.origin.file}:{verdict.origin.line}')}")
    if verdict.command:
        lines.append(f"  - {code(verdict.command)}")
    if verdict.repro:
        lines.append(f"  - repro: {code(verdict.repro)}")
    return lines


def counts_table(verdicts: Iterable[Verdict]) -> list[str]:
    """Module or operator x verdict, with the number of trials."""
    by_name: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        by_name.setdefault(verdict.short_name, Counter())[verdict.verdict] += 1
    words = [word for word in WORDS if any(counts[word] for counts in by_name.values())]
    ordered = sorted(by_name.items(), key=lambda item: (-_failures(item[1]), item[0].lower()))
    rows = (
        [code(name), *(str(counts[word]) if counts[word] else "" for word in words)]
        for name, counts in ordered
    )
    return table(["module or operator", *words], rows, range(1, len(words) + 1))


def _failures(counts: Counter[str]) -> int:
    return sum(counts[word] for word in FAILURES)
