"""The scripts of ``sbp completion``, in the shells that are here."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sbp.completion import SHELLS, all_commands, main

COMMANDS = all_commands()
BASH = shutil.which("bash")
PATIENCE = 15.0


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell, write in SHELLS.items():
        (folder / shell).write_text(write(COMMANDS))
    return folder


def in_bash(scripts: Path, folder: Path, lines: list[list[str]]) -> list[set[str]]:
    """What bash would offer for the last word of each line."""
    assert BASH is not None
    program = [f"source {scripts / 'bash'}"]
    for words in lines:
        quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
        program.append(f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _sbp")
        program.append('printf "%s\\n" "${COMPREPLY[@]}" END')
    ran = subprocess.run(
        [BASH, "--norc"],
        input="\n".join(program),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert ran.stderr == ""
    return [set(part.split("\n")) - {""} for part in ran.stdout.split("END\n")[:-1]]


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_offers_what_every_parser_has(scripts: Path, tmp_path: Path) -> None:
    flags = [{flag for one in command.options for flag in one.flags} for command in COMMANDS]
    offered = in_bash(scripts, tmp_path, [["sbp", *command.path, "-"] for command in COMMANDS])
    assert offered == flags
    assert {len(command.path) for command in COMMANDS} == {1, 2}
    assert sum(map(len, flags)) > 80


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_offers_commands_words_and_files(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "results 1.jsonl").write_text("")
    (tmp_path / "run").write_text("")
    asked = {
        ("sbp", "re"): {"report", "repro"},
        ("sbp", "known", ""): {"check", "update", "list"},
        ("sbp", "known", "check", "--known", "x", "--st"): {"--strict"},
        ("sbp", "run", "--level", ""): {"quick", "default", "full"},
        ("sbp", "run", "--level", "=", "f"): {"full"},
        ("sbp", "run", "--suite", "op"): {"ops", "optimizers"},
        ("sbp", "run", "-n", ""): set(),
        ("sbp", "run", "--no-watch", "--kn"): {"--known"},
        ("sbp", "report", "res"): {"results 1.jsonl"},
        ("sbp", "report", "--root", ""): {"a folder"},
        ("sbp", "report", "--html", "r"): {"results 1.jsonl", "run"},
        ("sbp", "lint", "--explain", "SBP10"): {f"SBP{number}" for number in range(100, 110)},
        ("sbp", "audit", "d"): {"dtensor"},
        ("sbp", "no-such-command", ""): set(),
    }
    offered = in_bash(scripts, tmp_path, [list(words) for words in asked])
    assert dict(zip(asked, offered, strict=True)) == asked


def type_in(words: list[str], folder: Path, set_up: list[str], typed: str, awaited: str) -> str:
    """What a shell shows on a terminal after ``set_up`` was entered and ``typed`` was pressed, up to ``awaited``."""
    ours, theirs = pty.openpty()
    environment = {
        "PATH": os.environ["PATH"],
        "TERM": "dumb",
        "HOME": str(folder),
        "PS1": "ready> ",
        "LC_ALL": "C",
    }
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    )
    os.close(theirs)
    shown = ""
    until = time.monotonic() + PATIENCE

    def read_to(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert time.monotonic() < until, f"{text!r} was never shown, but {shown!r}"
            if select.select([ours], [], [], 0.2)[0]:
                # zsh goes back over a character to write it anew.
                shown = re.sub(".\x08", "", shown + os.read(ours, 4096).decode(errors="replace"))

    try:
        for number, line in enumerate([*set_up, "printf 'set%s\\n' -up"]):
            if number == 0:
                read_to("ready> ")
            os.write(ours, f"{line}\n".encode())
        read_to("set-up")
        shown = shown.rpartition("set-up")[2]
        read_to("ready> ")
        shown = ""
        os.write(ours, typed.encode())
        read_to(awaited)
        return shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# What is typed, and what the line is then.
TYPED = {
    "sbp kno\tche\t": "sbp known check ",
    "sbp run --results ol\t": "sbp run --results old.jsonl ",
    "sbp lint --di\t": "sbp lint --diff ",
    "sbp run --level=f\t": "sbp run --level=full",
    "sbp report --root a\t": "sbp report --root afolder/",
}


@pytest.mark.skipif(BASH is None, reason="no bash")
@pytest.mark.parametrize("typed", TYPED)
def test_the_tab_key_in_bash(scripts: Path, tmp_path: Path, typed: str) -> None:
    (tmp_path / "old.jsonl").write_text("")
    (tmp_path / "afolder").mkdir()
    set_up = [f"source {scripts / 'bash'}"]
    words = [str(BASH), "--norc", "--noprofile", "-i"]
    assert TYPED[typed] in type_in(words, tmp_path, set_up, typed, TYPED[typed])


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
@pytest.mark.parametrize("typed", TYPED)
def test_the_tab_key_in_zsh(scripts: Path, tmp_path: Path, typed: str) -> None:
    (tmp_path / "old.jsonl").write_text("")
    (tmp_path / "afolder").mkdir()
    set_up = ["autoload -U compinit; compinit -u -D", f"source {scripts / 'zsh'}"]
    assert TYPED[typed] in type_in(["zsh", "-f", "-i"], tmp_path, set_up, typed, TYPED[typed])


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_fish(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("")
    (tmp_path / "afolder").mkdir()
    asked = {
        "sbp re": {"report", "repro"},
        "sbp known ": {"check", "update", "list"},
        "sbp known check --st": {"--strict"},
        "sbp run --level ": {"quick", "default", "full"},
        "sbp run --level=f": {"--level=full"},
        "sbp run --results ol": {"old.jsonl"},
        "sbp report --root ": {"afolder/"},
        "sbp report ol": {"old.jsonl"},
        "sbp diff --mark": {"--markdown"},
        "sbp merge run --pa": {"--part"},
    }
    program = [f"source {scripts / 'fish'}"]
    for line in asked:
        program += [f"complete -C '{line}'", "echo END"]
    ran = subprocess.run(
        ["fish", "--no-config", "-c", "\n".join(program)],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert ran.stderr == ""
    offered = [
        {row.partition("\t")[0] for row in part.splitlines()} for part in ran.stdout.split("END\n")[:-1]
    ]
    assert dict(zip(asked, offered, strict=True)) == asked


def test_the_shell_is_that_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("# Completes the commands of sbp in fish")
    monkeypatch.setenv("SHELL", "/bin/csh")
    assert main([]) == 2
    assert capsys.readouterr().err == ("sbp completion: name a shell: bash, zsh or fish; --help says more\n")


def test_no_torch_is_imported() -> None:
    script = "import sys, sbp.completion as c; c.main(['bash']); sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0
