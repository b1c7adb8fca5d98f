"""docs/lint.md and docs/inplace.md: their examples are those of the rules, and hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sbp.inplace.lint.config import Configuration, read
from sbp.inplace.lint.files import lint_text
from sbp.inplace.records import FAULTS, OUTCOMES

DOCS = Path(__file__).parents[2] / "docs"
LINT = (DOCS / "lint.md").read_text(encoding="utf-8")
CODES = re.findall(
    r"^### (SBP\d{3}).*?^Bad:\n\n```python\n(.*?)^```\n\nGood:\n\n```python\n(.*?)^```", LINT, re.M | re.S
)


def test_every_code_is_there() -> None:
    assert [code for code, _, _ in CODES] == [f"SBP{number}" for number in range(101, 110)]


@pytest.mark.parametrize(("code", "bad", "good"), CODES)
def test_the_bad_example_is_found_and_the_good_one_is_not(code: str, bad: str, good: str) -> None:
    found = {one.code for one in lint_text(bad, "bad.py", Configuration()).findings}
    assert code in found
    assert [
        one.code for one in lint_text(good, "good.py", Configuration()).findings if one.code == code
    ] == []


def test_the_configuration_is_accepted(tmp_path: Path) -> None:
    [block] = re.findall(r"```toml\n(.*?)```", LINT, re.S)
    path = tmp_path / "pyproject.toml"
    path.write_text(block)
    configuration = read(path)
    assert (configuration.level, configuration.sources) == ("certain", ("my_package.parallel.shard",))


def test_every_outcome_of_the_watch_is_explained() -> None:
    page = (DOCS / "inplace.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", page, re.M)) == {"outcome": "meaning", **OUTCOMES}
    assert all(f"`{word}`" in page for word in FAULTS)


def test_the_example_of_the_watch_runs() -> None:
    [block] = re.findall(r"```python\n(.*?)```", (DOCS / "inplace.md").read_text(encoding="utf-8"), re.S)
    setting = """
import tempfile
import torch, torch.distributed as dist
from torch.distributed.tensor import distribute_module, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = distribute_module(torch.nn.Linear(4, 4), mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = distribute_tensor(torch.randn(2, 4), mesh)
"""
    ran = subprocess.run([sys.executable, "-c", setting + block], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "optimizer:" in ran.stdout
