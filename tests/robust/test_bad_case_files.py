"""Case files that cannot be used: the planner says so in one line, whatever is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbp.planner import plan_trials

GOOD = """\
import torch
from torch import nn

import sbp
from sbp import case


@case
def linear():
    return nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)


@case(plan={"weight": "S(0)"}, meshes=["4"])
def planned():
    return nn.Linear(3, 2).double(), [torch.randn(4, 3, dtype=torch.float64)]
"""

BAD = {
    "empty": "",
    "no_case": "x = 1\n",
    "syntax": "def f(:\n",
    "indentation": "  x = 1\n y = 2\n",
    "null_byte": "x = 1\0\n",
    "no_text": b"\xff\xfe\x00x",
    "other_encoding": b"# coding: klingon\nx = 1\n",
    "missing_module": "import no_such_module_anywhere\n",
    "raises": "raise ValueError('on\\nimport')\n",
    "raises_without_text": "raise ValueError\n",
    "exits": "import sys\nsys.exit(0)\n",
    "own_base_exception": "class Own(BaseException): pass\nraise Own('\\x1b[31m')\n",
    "unprintable": "class Own(Exception):\n    def __str__(self): raise TypeError\nraise Own\n",
    "recursion": "def f(): f()\nf()\n",
    "imports_itself": "from bad_imports_itself import x\n",
    "returns_nothing": "from sbp import case\n@case\ndef f(): pass\n",
    "returns_a_number": "from sbp import case\n@case\ndef f(): return 7\n",
    "returns_a_class": "from sbp import case\nfrom torch import nn\n@case\ndef f(): return nn.Linear, 1\n",
    "wants_arguments": "from sbp import case\n@case\ndef f(a, b): return a\n",
    "build_raises": "from sbp import case\n@case\ndef f(): raise OSError(5, 'no')\n",
    "build_exits": "from sbp import case\nimport sys\n@case\ndef f(): sys.exit(3)\n",
    "case_of_a_class": "from sbp import case\n@case\nclass F: pass\n",
    "unknown_setting": "from sbp import case\n@case(colour='red')\ndef f(): pass\n",
    "same_name": "from sbp import case\n@case(name='a')\ndef f(): pass\n@case(name='a')\ndef g(): pass\n",
    "bad_mesh": "from sbp import case\n@case(meshes=['two'])\ndef f(): pass\n",
    "bad_placement": "from sbp import case\n@case(plan={'weight': 'Q(0)'})\ndef f(): pass\n",
    "name_of_lines": "from sbp import case\n@case(name='a\\nb\\x1b[31m/../..')\ndef f(): return 7\n",
    "deep": "x = " + "(" * 500 + ")" * 500 + "\n",
}


def request(target: str) -> dict[str, Any]:
    return {
        "suites": [],
        "targets": [target],
        "keyword": None,
        "meshes": ["4"],
        "dtypes": ["float64"],
        "device": "cpu",
        "placements": {},
        "ids": [],
        "shard": None,
        "rows": 2,
        "subject": "dtensor",
        "in_passes": False,
    }


def outcome(target: str) -> list[dict[str, Any]]:
    """The planner's messages for a file; whatever it raises is an error of the test."""
    before = set(sys.modules), list(sys.path)
    try:
        return list(plan_trials(request(target)))
    finally:
        for name in set(sys.modules) - before[0]:
            if name.startswith("_sbp_cases_"):
                del sys.modules[name]
        sys.path[:] = before[1]


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_case_file_is_one_line(here: Path, name: str) -> None:
    path = here / f"bad_{name}.py"
    content = BAD[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    messages = outcome(str(path))
    last = messages[-1]
    line = last["error"] if "error" in last else "; ".join(map(str, last["skipped"].values()))
    assert line.strip()
    assert "Traceback" not in line
    assert not any("trials" in message for message in messages)


@pytest.mark.parametrize(
    "target",
    ["no_such.py", ".py", "folder.py", "no.such.module", "a b:c", ":", "sbp:nothing", "..", "os:path", "-"],
)
def test_a_target_that_is_none(here: Path, target: str) -> None:
    (here / "folder.py").mkdir()
    messages = outcome(target)
    assert messages[-1].get("error"), messages


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=60,
)
@given(data=st.data())
def test_a_damaged_case_file_is_planned_or_refused(here: Path, data: Any) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = min(len(text), at + data.draw(st.integers(0, 30)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", "\n", "x", "(", '"', "=", "0", " ", ":", "None"]))
            + text[end:]
        )
    path = here / "damaged.py"
    path.write_text(text)
    last = outcome(str(path))[-1]
    assert last.get("error") or last.get("done")
