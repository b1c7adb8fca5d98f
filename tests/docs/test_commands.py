"""Every command in README, CONTRIBUTING and docs/ is run and its output compared with what the page says.

A page has its commands in ``console`` blocks: ``$ command``, then what it prints; a line ``...`` there stands for any
lines. A comment before a block says what is done with it where running it is not enough:

    <!-- test: ranks -->            it starts ranks: run with the distributed tests, on torch 2.13
    <!-- test: parse, WHY -->       too slow, or needs what is not here: its options are parsed, nothing is run

Commands of a page run one after the other in one folder. It has the page's own files (a block of Python whose first
line is ``# name.py``) and results.jsonl, old.jsonl, shard-1.jsonl, shard-2.jsonl and known.toml. Command lines in other
blocks, which show no output, are parsed.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from launch.spawn import find_mpirun
from sbp import run
from sbp.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ROOT / "tests/report/data/results.jsonl"
PROGRAMS = ("sbp", "mpirun", "python", ".venv/bin/python", "bash")
PATIENCE = 180.0


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its lines, and what the comment before it says."""

    language: str
    lines: tuple[str, ...]
    treatment: str

    @property
    def steps(self) -> list[tuple[str, list[str]]]:
        """The commands and the lines that they are said to print."""
        found: list[tuple[str, list[str]]] = []
        for line in self.lines:
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                assert found, f"a console block begins with a command, not with {line!r}"
                found[-1][1].append(line)
        return found


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, and the ones that are set off by four spaces (without a language)."""
    found: list[Block] = []
    lines: list[str] = []
    language: str | None = None
    treatment = "run"
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```") and language is None:
            language, lines = line[3:].strip(), []
        elif line == "```":
            assert language is not None
            found.append(Block(language, tuple(lines), treatment))
            language, treatment = None, "run"
        elif language is not None:
            lines.append(line)
        elif match := re.fullmatch(r"<!-- test: (ranks|parse), ?(.+) -->|<!-- test: ranks -->", line):
            treatment = match[1] or "ranks"
        elif line.startswith("    "):
            found.append(Block("", (line[4:],), "run"))
        else:
            assert "<!-- test" not in line, f"{page.name}: {line} says nothing that is known"
    assert language is None, f"{page.name}: a block is not closed"
    return found


def check_words(command: str) -> None:
    """Fail where a command line has an option that its program has not, or names a file that is not there."""
    for part in re.split(r"\s(?:\||&&)\s", command):
        words = [word for word in shlex.split(part) if not re.match(r"[A-Z_]+=", word)]
        if words[:1] == ["mpirun"]:
            assert words[1] == "-n" and words[2].isdigit(), command
            words = words[3:]
        if words[:3] == ["python", "-m", "sbp.run"]:
            run.make_parser().parse_args(words[3:])
        elif words[0] == "sbp":
            [target] = [one.target for one in COMMANDS if one.name == words[1]]
            import_module(target.partition(":")[0]).make_parser().parse_args(words[2:])
        elif words[0].endswith("python") and words[1] == "-m":
            assert importlib.util.find_spec(words[2].partition(".")[0]), command
            assert all((ROOT / word).exists() for word in words[3:] if re.fullmatch(r"[\w/]+\.py", word)), (
                command
            )
        elif words[0].endswith("python") or words[0] == "bash":
            assert (ROOT / words[1]).exists(), f"{command}: there is no {words[1]}"
        else:
            assert words[0] in ("tee", "pip", "pytest"), f"{command}: {words[0]} is not known here"


def commands_without_output(block: Block) -> list[str]:
    """The lines of a plain block that are command lines, without the words beside them."""
    found = []
    for line in block.lines:
        text = re.split(r"\s{2,}|\s#", line.strip())[0]
        if text.split(" ")[0] in PROGRAMS and " " in text:
            found.append(text)
    return found


PARSED = [
    pytest.param(command, id=f"{page.name}: {command}")
    for page in PAGES
    for block in blocks(page)
    for command in (
        [command for command, _ in block.steps]
        if block.language == "console" and block.treatment == "parse"
        else commands_without_output(block)
        if block.language == ""
        else []
    )
]


@pytest.mark.parametrize("command", PARSED)
def test_the_options_of_a_command_are_there(command: str) -> None:
    check_words(command)


def normal(text: str) -> list[str]:
    """Lines without what depends on the machine and the hour: seconds, rates, spaces at the ends of lines."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    lines = [line for line in lines if not re.match(r"\d+/\d+\+? trials, ", line)]
    return [re.sub(r"\bin [\d.]+ m?s\b", "in ... s", line) for line in lines]


def same(printed: list[str], said: list[str]) -> bool:
    """Whether the lines are those that are said; a line ``...`` stands for any lines, also for none."""
    pattern = "\n".join("*" if line == "..." else re.sub(r"([\[*?])", r"[\1]", line) for line in said)
    return fnmatch.fnmatchcase("\n".join(printed), pattern)


def prepare(folder: Path, page: Path) -> dict[str, str]:
    """Make what a page takes for granted in ``folder``; the environment for its commands."""
    text = RESULTS.read_text(encoding="utf-8")
    (folder / "results.jsonl").write_text(text)
    (folder / "old.jsonl").write_text(text)
    head, *verdicts, tail = text.splitlines(keepends=True)
    for number in (1, 2):
        mine = verdicts[number - 1 :: 2]
        first = head.replace('"seed"', f'"shard": "{number}/2", "seed"')
        last = re.sub(r'"planned": \d+', f'"planned": {len(mine)}', tail)
        (folder / f"shard-{number}.jsonl").write_text("".join([first, *mine, last]))
    [entry, *_] = [block for block in blocks(ROOT / "docs/known-failures.md") if block.language == "toml"]
    (folder / "known.toml").write_text("\n".join(entry.lines))
    for block in blocks(page):
        name = re.fullmatch(r"# (\w+\.py)", block.lines[0]) if block.lines else None
        if block.language == "python" and name is not None:
            (folder / name[1]).write_text("\n".join(block.lines) + "\n")
    scripts = folder.parent / f"{folder.name}-bin"
    scripts.mkdir()
    programs = {"sbp": f"{sys.executable} -m sbp.cli", "python": sys.executable, "mpirun": find_mpirun()}
    for name, program in programs.items():
        if program is not None:
            (scripts / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (scripts / name).chmod(0o755)
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    return {
        **given,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "1",
    }


def run_page(page: Path, treatment: str, folder: Path) -> None:
    environment = prepare(folder, page)
    for block in blocks(page):
        if block.language != "console" or block.treatment != treatment:
            continue
        for command, said in block.steps:
            done = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            printed, due = normal(done.stdout + done.stderr), normal("\n".join(said))
            difference = "\n".join(difflib.unified_diff(due, printed, page.name, "printed", lineterm=""))
            assert same(printed, due), f"$ {command}\n{difference}"


def pages_with(treatment: str) -> list[Path]:
    return [
        page
        for page in PAGES
        if any(block.language == "console" and block.treatment == treatment for block in blocks(page))
    ]


@pytest.mark.parametrize("page", pages_with("run"), ids=lambda page: page.name)
def test_commands_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    run_page(page, "run", tmp_path)


@pytest.mark.distributed
@pytest.mark.skipif(
    shutil.which("mpirun") is None and find_mpirun() is None, reason="no mpirun to start ranks with"
)
@pytest.mark.parametrize("page", pages_with("ranks"), ids=lambda page: page.name)
def test_commands_with_ranks_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    if not import_module("torch").__version__.startswith("2.13."):
        pytest.skip("the pages show what torch 2.13 does")
    run_page(page, "ranks", tmp_path)


def test_the_comparison_sees_differences() -> None:
    assert same(normal("a\n3 trials in 8.5 s: 2 pass\n"), normal("a\n3 trials in 11 s: 2 pass"))
    assert not same(normal("3 trials in 8.5 s: 2 pass"), normal("3 trials in 8.5 s: 3 pass"))
    assert same(["a", "b", "c"], ["a", "...", "c"]) and not same(["a", "b"], ["a", "...", "c"])
    assert not same(["S1"], ["S[1]"]) and same(["S[1]*"], ["S[1]*"])
    for wrong in (
        "sbp report --no-such-option",
        "bash no/such.sh",
        "mpirun -n 4 python -m sbp.run --meshh 4",
    ):
        with pytest.raises((SystemExit, AssertionError)):
            check_words(wrong)


def test_links_lead_to_files() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
        for path in re.findall(r"\bdocs/[\w-]+\.(?:md|png|py)\b", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
