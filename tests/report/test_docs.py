"""The pages about reports, known failures and CI: every command in them is run, and its output compared."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sbp.report.results import read

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("data")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def steps(block: str) -> list[tuple[str, list[str]]]:
    """The commands of a block and the lines that they are said to print."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def same(printed: str, said: list[str]) -> bool:
    """Whether the lines are those that are said; ``...`` stands for any lines."""
    pattern = "\n".join(re.sub(r"([\[\]*?])", r"[\1]", line) if line != "..." else "*" for line in said)
    return fnmatch.fnmatchcase(printed.rstrip("\n"), pattern.rstrip("\n"))


@pytest.fixture
def folder(tmp_path):
    """What the pages take for granted: a run's results, an old run, two shards, known failures, and sbp on the path."""
    shutil.copy(DATA / "results.jsonl", tmp_path / "results.jsonl")
    return tmp_path


def prepare(folder: Path) -> None:
    """The other files, where a page speaks of them."""
    text = (DATA / "results.jsonl").read_text()
    (folder / "old.jsonl").write_text(text)
    run, *verdicts, summary = text.splitlines(keepends=True)
    for number in (1, 2):
        mine = verdicts[number - 1 :: 2]
        head = run.replace('"seed"', f'"shard": "{number}/2", "seed"')
        tail = re.sub(r'"planned": \d+', f'"planned": {len(mine)}', summary)
        (folder / f"shard-{number}.jsonl").write_text("".join([head, *mine, tail]))
    (folder / "known.toml").write_text(blocks("known-failures.md", "toml")[0])


@pytest.mark.parametrize("page", ["reports.md", "known-failures.md"])
def test_every_command_prints_what_the_page_says(folder, page):
    scripts = folder.parent / f"{folder.name}-bin"
    scripts.mkdir()
    sbp = scripts / "sbp"
    sbp.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sbp.cli "$@"\n')
    sbp.chmod(0o755)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "LC_ALL": "C"}
    commands = 0
    for position, block in enumerate(blocks(page, "console")):
        if position or page != "reports.md":
            prepare(folder)
        for command, said in steps(block):
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
            )
            printed = done.stdout + done.stderr
            difference = "\n".join(
                difflib.unified_diff(said, printed.splitlines(), "the page", "sbp", lineterm="")
            )
            assert same(printed, said), f"$ {command}\n{difference}"
            commands += 1
    assert commands >= 4


def test_the_entry_of_the_page_can_be_read(folder):
    from sbp.known import load

    prepare(folder)
    [entry] = load(folder / "known.toml").entries
    assert entry.sometimes
    assert entry.link


def test_the_page_names_every_variable_of_the_stage():
    documented = set(re.findall(r"^\| `(SBP_[A-Z]+)`", (ROOT / "docs/ci.md").read_text(), re.MULTILINE))
    assert documented == set(
        re.findall(r"^#   (SBP_[A-Z]+)=", (ROOT / "ci/distributed.sh").read_text(), re.MULTILINE)
    )
    assert all(
        (ROOT / path).exists()
        for path in re.findall(r"`((?:ci/|action)[\w./-]+)`", (ROOT / "docs/ci.md").read_text())
    )


def test_what_a_real_run_wrote_is_read_in_full():
    """A file of sbp.run, as it is: every field that it writes has its place in the reader."""
    results = read(DATA / "results.jsonl")
    assert results.complete
    assert results.unread == {}
    for verdict in results.verdicts:
        known = set(type(verdict).__dataclass_fields__) | {"kind"}
        assert set(verdict.raw) <= known
        for finding, raw in zip(verdict.findings, verdict.raw["findings"], strict=True):
            assert set(raw) <= set(type(finding).__dataclass_fields__)
