"""What the README's first screen shows is what the command prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch.spawn import find_mpirun

README = Path(__file__).parents[2] / "README.md"


def normal(text: str) -> str:
    """Without what depends on the machine: seconds, and spaces at the ends of lines."""
    text = re.sub(r"in [\d.]+ s:", "in ... s:", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.mark.distributed
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="what torch 2.13 has wrong")
def test_the_first_screen_is_real() -> None:
    found = re.search(r"^```\n\$ (mpirun .*)\n((?s:.*?))^```", README.read_text(), flags=re.M)
    assert found is not None
    words = shlex.split(found[1])
    assert words[:1] + words[3:4] == ["mpirun", "python"]
    mpirun = find_mpirun()
    assert mpirun is not None
    words[0], words[3] = mpirun, sys.executable
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    printed = "\n".join(line for line in run.stdout.splitlines() if not re.match(r"\d+/\d+\+? trials", line))
    assert normal(printed) == normal(found[2])
