"""assert_conforms: from a plain Python process, on ranks behind the scenes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sbp import CaseError, ConformanceError, Train, assert_conforms, fused
from sbp.cases import Call, Case
from sbp.conform import dump, load_case
from sbp.ranks import Ranks, RanksError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def doubled(module: nn.Module, mesh: Any) -> nn.Module:
    module.weight.data *= 2
    return module


def refused(module: nn.Module, mesh: Any) -> nn.Module:
    raise NotImplementedError("no")


@pytest.mark.distributed
def test_one_line_for_a_module_a_plan_and_a_training(ranks: Ranks) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert_conforms(Scaled(), x, pool=ranks, level="quick")
    assert_conforms(torch.add, (x, x), kwargs={"alpha": 2}, pool=ranks, level="quick", mesh="4")
    with pytest.raises(ConformanceError) as raised:
        assert_conforms(Scaled(), x, plan=doubled, train=Train(steps=1), pool=ranks)
    assert "output of step 1: 2 x the reference on every rank" in str(raised.value)
    assert [record["verdict"] for record in raised.value.records] == ["wrong value"]
    # The same ranks go on, and what is checked is the module that is given, not one of that name before it.
    assert_conforms(
        Scaled(), x, spmd=as_it_is, placements={"x": "S(0)", "output": "S(0)", "weight.grad": "P"}, pool=ranks
    )
    with pytest.raises(ConformanceError, match="1 of 1 trials failed"):
        assert_conforms(Scaled(), x, plan=refused, pool=ranks)


def as_it_is(module: nn.Module, world: Any) -> nn.Module:
    return module


@pytest.mark.distributed
def test_a_script_without_a_guard_of_packages_or_installation(tmp_path: Path) -> None:
    """Ranks import what the script defines from its file, and end with it."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        from sbp import assert_conforms

        class Mine(nn.Module):
            def forward(self, x):
                return x.square()

        def keep(module, mesh):
            return module

        if __name__ == "__main__":
            assert_conforms(Mine(), torch.randn(4), plan=keep, ranks=2)
            print("conforms")
        """)
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "conforms", done.stderr
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sbp.served 2" not in listing


@pytest.mark.parametrize(
    ("module", "inputs", "settings", "words"),
    [
        (3, (), {}, "assert_conforms takes a module or a function, not a int"),
        (nn.ReLU(), torch.ones(2), {"plann": 1}, "unexpected keyword argument 'plann'"),
        (nn.ReLU(), torch.ones(2), {"dtype": "float17"}, "'float17' is not a dtype to test"),
        (nn.ReLU(), torch.ones(2), {"level": "some"}, "'some' is not a level"),
        (nn.ReLU(), torch.ones(2), {"mesh": "3x"}, "'3x' is not a mesh"),
        (nn.ReLU(), torch.ones(2), {"mesh": "2x3"}, "mesh 2x3 has 6 ranks, but there are 4"),
        (nn.Linear(2, 3), torch.ones(4, 5), {}, "case Linear fails on one device already: RuntimeError"),
        (nn.Dropout(), torch.ones(4, 5), {}, "case Dropout is random"),
        (nn.ReLU(), torch.ones(4), {"plan": refused, "meshes": "8"}, "needs 8 ranks, there are 4"),
        (nn.ReLU(), torch.ones(4), {"plan": lambda m, mesh: m}, "<lambda> is defined inside a function"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_starts_nothing(
    module: Any, inputs: Any, settings: Any, words: str
) -> None:
    pool = Ranks(4)
    with pytest.raises(CaseError) as raised:
        assert_conforms(module, inputs, pool=pool, **settings)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert pool._process is None


def test_a_case_survives_the_way_to_the_ranks() -> None:
    case = Case(
        "c",
        as_it_is,
        spmd=as_it_is,
        parameters={"qkv": fused("q", "k", dim=1, blocks=(2, 1))},
        train=Train(optimizer="AdamW"),
    )
    back = load_case(dump(case))
    assert back.build is as_it_is and back.train == case.train
    packed = back.parameters["qkv"]
    assert not isinstance(packed, str) and packed.pack(torch.ones(1, 2), torch.zeros(1, 1)).tolist() == [
        [1, 1, 0]
    ]
    assert Call(abs, (1,)) == Call(abs, (1,))


def test_ranks_that_cannot_start_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho first; echo there is no mpirun here >&2; exit 2\n")
    (tmp_path / "python").chmod(0o755)
    pool = Ranks(2)
    with pytest.raises(RanksError, match="2 ranks could not be started: there is no mpirun here"):
        pool.define("x", b"")
    assert pool._process is None and pool._folder is None
