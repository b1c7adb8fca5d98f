"""Bad input at the real commands, in processes of their own and on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.spawn import find_mpirun
from sbp.report import results


def sbp(*words: str | bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "sbp", *words],
        env={**os.environ, **environment},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def ranks(*words: str | bytes, size: int = 2, **environment: str) -> subprocess.CompletedProcess[bytes]:
    mpirun = find_mpirun()
    assert mpirun is not None
    return subprocess.run(
        [mpirun, "-n", str(size), sys.executable, "-m", "sbp.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=200,
    )


def is_one_line(ended: subprocess.CompletedProcess[bytes], codes: tuple[int, ...] = (2, 3)) -> None:
    assert ended.returncode in codes, ended
    assert b"Traceback" not in ended.stderr, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith((b"sbp", b"launch"))]
    assert len(said) == 1, ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        (b"report", b"\xff\xfe.jsonl"),
        (b"merge", b"\xff.jsonl", b"-o", b"\xfe.jsonl"),
        (b"known", b"list", b"--known", b"\xff.toml"),
        (b"signatures", b"--diff", b"\xff", b"\xfe"),
        (b"\x1b[31m",),
        (b"lint", b"\xff.py"),
        (b"run", b"--mesh", b"\xff"),
    ],
)
def test_arguments_that_are_no_text(here: Path, words: tuple[bytes, ...]) -> None:
    ended = sbp(*words, LC_ALL="C.UTF-8")
    is_one_line(ended)
    assert b"\x1b" not in ended.stderr


def test_a_terminal_that_knows_few_characters(here: Path, synthetic) -> None:
    records = synthetic.make_records(8)
    records[1].update(id="modules/Ärger→/4/x", case="Ärger→", verdict="error", known=None)
    path = synthetic.write(here / "r.jsonl", records)
    ended = sbp("report", str(path), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ended.returncode == 1, ended
    assert b"\\xc4rger\\u2192" in ended.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "3"),
        ("--suite", "none"),
        ("-k", "nothing_has_this_in_its_id"),
        ("NoSuchModule",),
        ("no_such_file.py",),
        ("--subject", "no.such.module:Class"),
        ("--id", "modules/None/2/all=B"),
        (b"--mesh", b"\xff"),
    ],
    ids=str,
)
def test_on_ranks_one_of_them_speaks(here: Path, words: tuple[str | bytes, ...]) -> None:
    is_one_line(ranks(*words))


ENDINGS = {
    "exits_at_once": "import os\nos._exit(0)\n",
    "crashes": "import ctypes\nctypes.string_at(0)\n",
    "kills_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "interrupts": "raise KeyboardInterrupt\n",
    "base_exception": (
        "class Own(BaseException): pass\n\nfrom sbp import case\n@case\ndef f(): raise Own('\\x1b[31m')\n"
    ),
    "closes_everything": "import os\nos.closerange(3, 200)\n",
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(ENDINGS))
def test_a_case_file_that_ends_its_process(here: Path, name: str) -> None:
    (here / "cases.py").write_text(ENDINGS[name])
    ended = ranks("cases.py")
    is_one_line(ended)
    assert b"\x1b" not in ended.stderr


NASTY = """\
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sbp import case


class Loud(nn.Module):
    def forward(self, x):
        if isinstance(x, DTensor):
            print("\\x1b[2J")
            raise ValueError("a \\x1b[31m[bold]text[/nonsense]\\ud800\\x07\\u202e")
        return x * 2


@case(name="[bold]odd\\x1b[31m..escape<b>")
def loud():
    return Loud(), torch.randn(4, 3, dtype=torch.float64)
"""


@pytest.mark.distributed
def test_what_a_case_says_costs_its_trial_and_does_not_reach_the_terminal(here: Path) -> None:
    (here / "cases.py").write_text(NASTY)
    (here / "work").mkdir()
    before = set(here.rglob("*"))
    ended = ranks("cases.py", "--results", "r.jsonl", TTY_COMPATIBLE="1", FORCE_COLOR="1")
    assert ended.returncode == 1, ended
    assert b"Traceback" not in ended.stderr
    # rich colours its own words; nothing else may.
    for code in (b"\x1b[2J", b"\x07", "\u202e".encode(), b"\x1b[31m["):
        assert code not in ended.stdout + ended.stderr
    assert b"\\x1b" in ended.stdout
    read = results.read(here / "r.jsonl")
    assert read.complete and read.counts.get("error")
    for line in (here / "r.jsonl").read_text().splitlines():
        json.loads(line)
    # A name with .. and slashes names no file anywhere.
    made = {path.name for path in set(here.rglob("*")) - before}
    assert made <= {"r.jsonl", "__pycache__"} | {name for name in made if name.endswith(".pyc")}
