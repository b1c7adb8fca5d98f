#!/usr/bin/env python3
"""Writes docs/findings-torch.md from the known failures that ship and the results of runs.

python docs/make_findings.py modules.jsonl inplace.jsonl     reads the runs, writes findings-torch.json and the page
python docs/make_findings.py                                 writes the page from findings-torch.json
python docs/make_findings.py --check                         fails where the page is not what would be written

findings-torch.json keeps what the page needs of the runs, which are too large to keep: for each entry how many trials
bore it out, and one of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from sbp.known import SHIPPED, Entry, Known, load
from sbp.report.results import read
from sbp.words import FAILURES

HERE = Path(__file__).parent
DIGEST = HERE / "findings-torch.json"
PAGE = HERE / "findings-torch.md"


def digest(paths: list[Path], known: Known) -> dict[str, Any]:
    """What the page says of the runs. Entries are told apart by their reasons."""
    runs: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        results = read(path)
        torch = results.run.versions.get("torch", "")
        verdicts = list(results.verdicts)
        failures = [verdict for verdict in verdicts if verdict.verdict in FAILURES]
        runs.append(
            {
                "suites": sorted({verdict.suite for verdict in verdicts}),
                "torch": torch,
                "trials": len(verdicts),
                "failures": len(failures),
                "problems": list(results.problems),
                "stopped": results.summary.stopped if results.summary else "",
            }
        )
        for verdict in failures:
            entry = known.match(verdict.raw, torch)
            if entry is None:
                continue
            one = found.setdefault(entry.reason, {"trials": 0, "verdicts": {}})
            one["trials"] += 1
            one["verdicts"][verdict.verdict] = one["verdicts"].get(verdict.verdict, 0) + 1
            finding = verdict.findings[0] if verdict.findings else None
            # The shortest id says the most; its words are those of the run.
            if "id" not in one or (len(verdict.id), verdict.id) < (len(one["id"]), one["id"]):
                one["id"] = verdict.id
                one["quantity"] = finding.quantity if finding else ""
                one["relation"] = finding.relation.splitlines()[0] if finding and finding.relation else ""
                one["command"] = verdict.raw.get("command", "")
    return {"runs": runs, "findings": {reason: found[reason] for reason in sorted(found)}}


def page(known: Known, kept: dict[str, Any]) -> str:
    """The page as Markdown."""
    lines = [
        "# Findings in torch 2.13",
        "",
        "Written by `docs/make_findings.py` from the known failures that ship (`sbp/data`) and the runs below, never",
        "by hand. Reasons are as that file has them: checked with a script or in DTensor's source, but for those that",
        "it names as read from the errors.",
        "",
        "| suites | torch | trials | failures | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for run in kept["runs"]:
        whole = "; ".join([*run["problems"], *filter(None, [run["stopped"]])]) or "complete"
        numbers = f"{run['trials']:,} | {run['failures']:,}"
        lines.append(f"| {', '.join(run['suites'])} | {run['torch']} | {numbers} | {whole} |")
    seen, unseen = [], []
    for entry in known.entries:
        one = kept["findings"].get(entry.reason)
        (unseen if one is None else seen).append(entry)
    for entry in seen:
        one = kept["findings"][entry.reason]
        words = ", ".join(f"{number} {word}" for word, number in sorted(one["verdicts"].items()))
        lines += [
            "",
            f"## {title(entry)}",
            "",
            entry.reason,
            "",
            f"Seen in {one['trials']} trials: {words}. Such as:",
            "",
        ]
        subject = f"{one['quantity']}: " if one["quantity"] else ""
        lines += ["```text", one["id"], f"  {subject}{one['relation']}"]
        if one["command"]:
            lines.append(f"  {one['command']}")
        lines.append("```")
    if unseen:
        lines += ["", "## Not seen in these runs", ""]
        lines += ["They show at other levels or hash seeds, or in what the runs did not reach.", ""]
        lines += [f"- **{title(entry)}**: {entry.reason}" for entry in unseen]
    return "\n".join(lines) + "\n"


def title(entry: Entry) -> str:
    """The modules or operators that the entry is about, each once."""
    names = []
    for pattern in entry.patterns:
        suite, _, rest = pattern.text.partition("/")
        # A module's case goes on with its arguments or a number, an operator's with a colon and sizes.
        found = re.match(r"[\w?]+", rest) if suite == "modules" else re.match(r"[^:*]+", rest)
        names.append(f"`{found[0] if found else rest}`")
    return ", ".join(dict.fromkeys(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, help="of runs on torch 2.13")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is not current"
    )
    options = parser.parse_args()
    known = load(SHIPPED)
    if options.results and not options.check:
        DIGEST.write_text(json.dumps(digest(options.results, known), indent=1, ensure_ascii=False) + "\n")
    text = page(known, json.loads(DIGEST.read_text(encoding="utf-8")))
    if options.check:
        if PAGE.read_text(encoding="utf-8") != text:
            print(
                "make_findings: docs/findings-torch.md is not current; python docs/make_findings.py",
                file=sys.stderr,
            )
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
