"""The table of what mutates: current, and read without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of torch 2.13")
def test_the_table_is_current() -> None:
    command = [sys.executable, "-m", "sbp.inplace.make_table", "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_lint_imports_no_torch() -> None:
    code = "import sys; from sbp.inplace.lint.command import main; main(['--explain', 'SBP101']); "
    code += "sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
