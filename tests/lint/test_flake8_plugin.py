"""The lint as flake8 runs it, found by its entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = """\
from torch.distributed.tensor import distribute_tensor


def step(x, mesh, y):
    x = distribute_tensor(x, mesh)
    x += y
    x.mul_(2)  # noqa: SBP102
    count = 0
    count += 1
    return x, count
"""


def flake8(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flake8", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_flake8_finds_the_plugin_and_its_findings(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SOURCE)
    ended = flake8(tmp_path, "--select", "SBP", "model.py")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 1, ended
    assert len(lines) == 1 and lines[0].startswith("model.py:6:5: SBP101 "), lines
    assert "sbp-conformance" in flake8(tmp_path, "--version").stdout


def test_it_is_silent_where_nothing_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SOURCE.replace("x += y", "x = x + y"))
    ended = flake8(tmp_path, "--select", "SBP", "model.py")
    assert (ended.returncode, ended.stdout) == (0, "")
