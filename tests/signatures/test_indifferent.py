"""Inputs whose values do not matter are found out once, not tried with every partial placement."""

from __future__ import annotations

import torch

from sbp.oracle.calls import Call
from sbp.oracle.gradients import gradient_calls
from sbp.oracle.signatures import Findings, _Search, find_signatures, usable_samples


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def words(findings: Findings) -> set[str]:
    return set(map(str, findings.signatures))


def test_partial_placements_of_an_input_that_gives_its_shape_alone() -> None:
    findings = find_signatures([Call("expand_as", torch.Tensor.expand_as, (normal(1, 6), normal(6, 6)))])
    found = words(findings)
    assert {"B, P -> B", "P, P -> P", "P, P(max) -> P", "B, S(0) -> S(0)", "S(1), S(1) -> S(1)"} <= found
    assert "B, P -> P" not in found and "P, S(1) -> P" not in found


def test_what_depends_on_few_values_only_is_not_taken_for_indifferent() -> None:
    def mostly_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + (y > 3).any()

    findings = find_signatures([Call("mostly_shape", mostly_shape, (normal(6, 6), normal(6, 6)))])
    assert "S(0), B -> S(0)" in words(findings)
    assert "S(0), P -> S(0)" not in words(findings)


def test_it_finds_what_trying_them_all_finds() -> None:
    call = Call("where", torch.where, (normal(6, 4) > 0, normal(6, 4), normal(4)))
    (gradients,) = [calls for name, calls in gradient_calls([call], "").items() if name == "input 1"]

    class TriesAll(_Search):
        def _set_indifferent_aside(self) -> None:
            """None is set aside."""

    with torch.no_grad():
        every = TriesAll(usable_samples(gradients), (2, 3), "", 4000, ("sum",)).find()
    quick = find_signatures(gradients, (2, 3), partials=("sum",))
    assert words(quick) == words(every)
    assert quick.judged == every.judged
    assert quick.ran < every.ran


def test_many_of_them_are_listed_on_few_at_once(monkeypatch: object) -> None:
    call = Call("first", lambda x, *_: x.clone(), tuple(normal(6) for _ in range(7)))
    findings = find_signatures([call], (2,))
    assert "P, P, B, B, B, B, B -> P" in words(findings)
    assert "on few of them at once only" in findings.how
    assert len(findings.signatures) < 30_000
