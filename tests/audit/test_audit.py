"""The audit of DTensor's rules, on operators whose rules are understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sbp.audit import audit_calls, traffic
from sbp.audit_cli import main, markdown_table
from sbp.audit_dtensor import ask, dispatched
from sbp.oracle.calls import Call
from sbp.placement import B, P, S


def audit(function: Any, *args: Any, written: tuple[int, ...] = ()) -> dict[str, Any]:
    return audit_calls([[Call(function.__name__, function, args, {}, written)]], "test")


def unsound(entry: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(f["rule"], ", ".join(f["inputs"]), f["kind"]) for f in entry["unsound"]}


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def test_fill_keeps_partial() -> None:
    entry = audit(torch.Tensor.fill_, matrix(4, 4), 3.0, written=(0,))
    assert ("aten.fill_.Scalar", "P", "wrong result") in unsound(entry)
    assert not any(lie in ("B", "S(0)", "S(1)", "P(avg)") for _, lie, _ in unsound(entry))


def test_markdown_tells_a_rule_once() -> None:
    entry = audit(torch.Tensor.fill_, matrix(4, 4), 3.0, written=(0,))
    lines = markdown_table({"fill": entry, "again": entry, "broken": {"error": "it died"}})
    assert len(lines) == 3
    assert lines[2].startswith("| `aten.fill_.Scalar` | wrong result |") and "`P -> P`" in lines[2]


def test_hardswish_in_place_writes_to_a_copy() -> None:
    entry = audit(torch._C._nn.hardswish_, matrix(4, 4), written=(0,))
    assert ("aten.hardswish_.default", "P", "writes to a copy") in unsound(entry)


def test_scatter_add_in_place_writes_to_a_copy() -> None:
    index = torch.randint(0, 4, (4, 4), generator=torch.Generator().manual_seed(1))
    entry = audit(torch.Tensor.scatter_add_, matrix(4, 4), 0, index, matrix(4, 4), written=(0,))
    assert any(lie.startswith("S(0)") and kind == "writes to a copy" for _, lie, kind in unsound(entry))


def test_gather_with_fewer_rows_of_the_index() -> None:
    index = torch.randint(0, 4, (8, 4), generator=torch.Generator().manual_seed(1))
    entry = audit(torch.gather, matrix(8, 4), 1, index)
    wrong = [f for f in entry["unsound"] if f["runs on"] == ["S(0)", "S(0)"]]
    assert wrong and all("i64[4, 4]" in f["call"] for f in wrong)


def test_bmm_of_a_whole_and_a_partial_is_partial() -> None:
    """It is linear in either operand, so the claim ``B, P -> P`` is true, as is ``P, B -> P``."""
    call = Call("bmm", torch.bmm, (torch.randn(2, 4, 4), torch.randn(2, 4, 4)))
    (recorded,) = dispatched(call)
    for lie in ((B, P("sum")), (P("sum"), B)):
        claim = ask(recorded, lie, 2)
        assert claim.inputs == lie and claim.outputs == (P("sum"),)
    entry = audit_calls([[call]], "test")
    assert entry["judged"] > 0 and not entry["unsound"]


def test_needless_traffic() -> None:
    entry = audit(torch.clone, matrix(4, 4))
    (finding,) = entry["missing"]
    assert (finding["inputs"], finding["true"], finding["runs on"]) == (["P"], [["P"]], ["B"])
    # An all-reduce on two ranks: half of the 128 bytes, twice.
    assert (finding["collectives"], finding["bytes"]) == (1, 128)


def test_traffic_by_placements() -> None:
    tensor = [matrix(4, 4)]
    assert traffic(tensor, (B,), (S(0),), 4).collectives == 0
    assert traffic(tensor, (S(0),), (B,), 4).received == 96
    assert traffic(tensor, (S(0),), (S(1),), 4).received == 24
    assert traffic(tensor, (P("sum"),), (S(1),), 4).received == 96
    assert traffic(tensor, (P("sum"),), (B,), 4).received == 192


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dtensor", "fill", "--json", str(tmp_path / "audit.json"), "--processes", "1"]) == 1
    assert "unsound: aten.fill_.Scalar P -> P: wrong result" in capsys.readouterr().out
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["subject"] == "dtensor" and written["operators"]["fill"]["judged"] > 0


def test_an_operator_that_does_not_end_costs_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dtensor", "scatter_add", "--seconds", "0.01", "--processes", "1"]) == 3
    assert "scatter_add  could not be judged: not done within 0.01 s" in capsys.readouterr().out


def test_unknown_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dtensor", "matmull"]) == 2
    assert "did you mean matmul" in capsys.readouterr().err
