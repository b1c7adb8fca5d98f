"""What is claimed of a quantity, and how it is judged: meshes of its own, second names, random results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sbp import Case, Parallel
from sbp.placement import B, Mesh, P, S, parse_sbp, show, split
from sbp.program import Program
from sbp.subjects.parallel import (
    Grid,
    as_parallel,
    call_of,
    claim_of,
    clean_module_names,
    loss_sbp,
    mean_factor,
)
from sbp.subjects.planned import aliases, other_values
from sbp.verdict.compare import Observed, Row, compare_all, computed_in
from sbp.verdict.judge import Judgement, judge_rows

MESH = Mesh((2, 2))
FULL = np.round(np.random.default_rng(0).standard_normal((8, 3)) * 1024) / 1024


class Due:
    noise = (0.0, 0.0)

    def __init__(self, value: np.ndarray, kind: str = "value") -> None:
        self.value, self.kind, self.dtype, self.norm = (
            value,
            kind,
            str(value.dtype),
            float(np.linalg.norm(value)),
        )


def judge(pieces: list[np.ndarray], random: bool = False, name: str = "output", **claim: Any) -> Judgement:
    """Judge pieces of FULL on a 2 x 2 mesh; ``claim`` goes to Observed."""
    rows = []
    for rank, piece in enumerate(pieces):
        seen = Observed(name, "value", shape=None, dtype="float64", local=piece, **claim)
        compared = compare_all({name: seen}, {"output": Due(FULL)}, MESH, rank, True, random)
        rows.append([Row.from_list(row.to_list()) for row in compared if row.name == name])
    return judge_rows(rows, MESH)


# ------------------------------------------------------------------------------------------- judging


def test_a_quantity_may_lie_on_another_mesh_of_the_same_ranks() -> None:
    pieces = split(FULL, (S(0),), Mesh((4,)))
    assert judge(pieces, claimed="S(0)", mesh="4").verdict == "pass"
    partial = split(FULL, (P(),), Mesh((4,)), np.random.default_rng(1))
    assert judge(partial, claimed="P", mesh="4").verdict == "pass"
    found = judge([*pieces[:3], pieces[3] + 1], claimed="S(0)", mesh="4").findings[0]
    assert (found.verdict, found.rank, found.mesh) == ("wrong value", 3, "4")
    assert (
        judge([pieces[0], pieces[0], pieces[2], pieces[3]], claimed="S(0)", mesh="4").verdict == "wrong value"
    )


def test_a_second_tensor_that_stands_for_one_is_compared_with_that_one() -> None:
    name = "output (as head)"
    assert judge([FULL] * 4, name=name, claimed="B", like="output").verdict == "pass"
    found = judge([FULL * 2] * 4, name=name, claimed="B", like="output").findings[0]
    assert (found.verdict, found.quantity) == ("wrong value", name)


def test_a_claim_that_is_not_what_was_declared_is_a_wrong_layout() -> None:
    found = judge([FULL] * 4, claimed="B", problem="it claims B, the case declares S(0)").findings[0]
    assert found.verdict == "wrong layout" and found.relation.startswith(
        "it claims B, the case declares S(0)"
    )


def dropped(seed: int, shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.where(random.random(shape) < 0.5, 0.0, random.standard_normal(shape))


def test_random_results_are_judged_by_their_patterns() -> None:
    def judged(pieces: list[np.ndarray], claimed: str) -> Judgement:
        due = {"output": Due(np.zeros((8, 12)))}
        rows = []
        for rank, piece in enumerate(pieces):
            seen = Observed("output", "value", claimed, None, "float64", piece)
            rows.append(compare_all({"output": seen}, due, MESH, rank, True, random=True))
        return judge_rows(rows, MESH)

    a, b, c, d = (dropped(seed) for seed in range(4))
    assert judged([a, b, c, d], "(S(0), S(1))").verdict == "pass"
    same = judged([a, b, np.abs(a), d], "(S(0), S(1))").findings[0]
    assert (same.verdict, same.ranks) == (
        "wrong value",
        (2,),
    ) and "pattern of rank 0 again on rank 2" in same.relation
    half = [dropped(seed, (4, 12)) for seed in range(2)]
    assert judged([half[0], half[0], half[1], half[1]], "(S(0), B)").verdict == "pass"
    differing = judged([half[0], half[1], half[1], half[1]], "(S(0), B)").findings[0]
    assert (
        differing.verdict == "ranks disagree"
        and differing.relation == "replicas are not the same bits on rank 1"
    )
    # Without zeros (or with little else) there is no pattern to compare.
    assert judged([np.ones((4, 6))] * 4, "(S(0), S(1))").verdict == "pass"
    assert judged([a[:2], b, c, d], "(S(0), S(1))").verdict == "wrong layout"


# ------------------------------------------------------------------------------------- what a case says


def grid(*names: str, mesh: Mesh = MESH) -> Grid:
    return Grid(mesh, names, None)  # type: ignore[arg-type]


def make(**settings: Any) -> Case:
    return Case("c", lambda: None, plan=lambda module, mesh: module, **{"axes": ("dp", "tp"), **settings})


def test_placements_are_said_by_axis_or_in_a_row() -> None:
    case = make(
        placements={"x": {"tp": "S(1)"}, "output": "(S(0), B)", "output[1]": "B", "w.grad": {"dp": "P"}}
    )
    here = grid("dp", "tp")
    assert here.resolve(case, "x") == (B, S(1))
    assert here.resolve(case, "output[0].a") is None
    assert here.resolve(case, "output[0].a", nested=True) == (S(0), B)
    assert here.resolve(case, "output[1]", nested=True) == (B, B)
    assert here.gradient(case, "w") == (P(), B) and here.gradient(case, "x") == (B, S(1))
    assert here.gradient(case, "nothing") is None


def test_the_gradient_of_a_sum_is_whole_on_every_rank() -> None:
    assert grid("dp", "tp").gradient(make(placements={"output": "(P, S(1))"}), "output") == (B, S(1))


@pytest.mark.parametrize(
    ("mean_over", "sbp", "factor"),
    [
        ((), "(S(0), B)", 1),
        ("dp", "(S(0), B)", 2),  # each rank's loss is the mean over its own half
        (("dp", "tp"), "(S(0), S(1))", 4),
        ("dp", "(B, S(0))", 1),  # every rank along dp has the whole loss
        ("dp", "(P, B)", 2),
        ("dp", "(P(avg), B)", 1),
        ((), "(P(avg), B)", 0.5),
    ],
)
def test_what_a_rank_goes_backward_from_is_scaled_as_its_loss_counts(
    mean_over: Any, sbp: str, factor: float
) -> None:
    assert mean_factor(parse_sbp(sbp), grid("dp", "tp"), make(mean_over=mean_over)) == factor


def test_the_loss_is_a_mean_over_the_axes_that_split_the_batch() -> None:
    x = {"x": torch.ones(2)}
    case = make(mean_over=("dp", "tp"), placements={"x": {"dp": "S(0)"}})
    assert loss_sbp(case, grid("dp", "tp"), x) == (P("avg"), B)
    assert loss_sbp(make(), grid("dp", "tp"), x) is None
    assert loss_sbp(make(placements={"loss": "(P, B)"}), grid("dp", "tp"), x) == (P(), B)


def test_a_plain_tensor_claims_what_is_declared() -> None:
    here = grid("dp", "tp")
    assert claim_of(torch.ones(2), None, here).sbp is None
    assert show(claim_of(torch.ones(2), (S(0), B), here).sbp or ()) == "(S(0), B)"


# ------------------------------------------------------------------------------------------- modules


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(()))


def test_names_are_cleaned_of_what_wrappers_add() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    net[1][0] = checkpoint_wrapper(net[1][0])
    compiled = torch.compile(net, backend="eager")
    names = clean_module_names(compiled)
    assert {names[path] for path, _ in compiled.named_modules()} == {"", "0", "1", "1.0"}
    # A module of one's own called `module` keeps its name: only DDP's is left out.
    plain = nn.Module()
    plain.module = nn.Linear(2, 2)
    assert clean_module_names(plain) == {"": "", "module": "module"}


def test_tied_weights_have_one_name() -> None:
    names = aliases(Program(Two()))
    assert names == {"table.weight": "table.weight", "head.weight": "table.weight", "scale": "scale"}


def test_a_new_module_to_load_into_has_none_of_the_old_values() -> None:
    program = Program(Two(), (torch.ones(2),), names=("tokens",))
    other = other_values(program)
    assert not any(tensor.any() for tensor in (*other.parameters().values(), *other.buffers().values()))
    assert other.module is not None and other.module.head.weight is other.module.table.weight
    assert program.parameters()["table.weight"].any() and other.args[0].all()


def test_recomputed_modules_are_named_as_in_the_reference() -> None:
    calls: list[str] = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return super().forward(x)

    net = nn.Sequential(Layer(2, 2), nn.Tanh(), Layer(2, 2))
    call = call_of(Parallel(net), make(recompute="2"), clean_module_names(net))
    call(torch.randn(3, 2, requires_grad=True)).sum().backward()
    assert len(calls) == 3  # the second layer's forward ran again in the backward pass
    with pytest.raises(ValueError, match=r"case c: no module is called 'layers\.\*'"):
        call_of(Parallel(net), make(recompute="layers.*"), clean_module_names(net))


def test_a_plan_returns_a_module_or_changes_it_in_place() -> None:
    module = nn.Linear(2, 2)
    assert as_parallel(None, module, "the plan").module is module
    assert as_parallel(torch.relu, module, "the plan").module is torch.relu
    with pytest.raises(ValueError, match="the plan must return a module, a function or a Parallel, not int"):
        as_parallel(3, module, "the plan")


def test_results_of_autocast_are_as_exact_as_the_dtype_that_was_computed_in() -> None:
    def judged(error: float) -> str:
        seen = Observed("output", "value", "B", (8, 3), "float64", FULL * (1 + error))
        rows = compare_all({"output": seen}, {"output": Due(FULL)}, MESH, 0, True)
        return judge_rows([computed_in(rows, "bfloat16")], MESH).verdict

    assert judged(1e-3) == "pass"
    assert judged(1.0) == "wrong value"
    index = np.arange(3)
    counted = compare_all(
        {"n": Observed("n", "value", "B", (3,), "int64", index + 1)}, {"n": Due(index)}, MESH, 0, True
    )
    assert computed_in(counted, "bfloat16") == counted
