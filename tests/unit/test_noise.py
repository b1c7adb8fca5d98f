"""Below float64: what rounding explains passes, and what it does not is found."""

import numpy as np
import pytest
import torch
from torch import nn

from sbp.oracle.noise import low_reference, with_noise_of_cancelled
from sbp.oracle.reference import Reference, compute_reference
from sbp.placement import Mesh
from sbp.program import Program, to_numpy
from sbp.verdict.compare import Observed, compare_all
from sbp.verdict.judge import Judgement, judge_rows

LOW = ("bfloat16", "float16", "float32")


def judge(reference: Reference, found: dict[str, torch.Tensor], ranks: int = 1) -> Judgement:
    """The verdict on plain tensors that every rank holds."""
    mesh = Mesh((ranks,))
    observed = {
        name: Observed(
            name,
            reference.quantities[name].kind,
            None,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            to_numpy(tensor),
        )
        for name, tensor in found.items()
    }
    expected = {name: reference.quantities[name] for name in found}
    return judge_rows([compare_all(observed, expected, mesh, rank, True) for rank in range(ranks)], mesh)


def linear(dtype: str, seed: int) -> tuple[Program, nn.Linear, torch.Tensor]:
    torch.manual_seed(seed)
    module = nn.Linear(64, 16).to(getattr(torch, dtype))
    x = torch.randn(8, 64, dtype=module.weight.dtype)
    return Program(module, (x,)), module, x


def row_parallel(module: nn.Linear, x: torch.Tensor, pieces: int, biases: int = 1) -> torch.Tensor:
    """What a row-parallel linear layer computes: each rank a part of the sum, rounded, then added up in turn."""
    parts = zip(x.chunk(pieces, 1), module.weight.chunk(pieces, 1), strict=True)
    total = torch.zeros(len(x), module.out_features, dtype=x.dtype)
    for part, weight in parts:
        total = total + part @ weight.T
    return (total + biases * module.bias).detach()


@pytest.mark.parametrize("dtype", LOW)
def test_the_truth_is_the_float64_result_under_the_name_of_the_low_one(dtype: str) -> None:
    program, module, x = linear(dtype, 0)
    due = low_reference(program, "linear", dtype, spread=1.0).quantities["output"]
    assert due.value is not None and due.dtype == dtype and due.value.dtype == np.float64
    exact = x.double() @ module.weight.double().T + module.bias.double()
    np.testing.assert_allclose(due.value, exact.detach().numpy(), rtol=1e-12)
    epsilon = torch.finfo(x.dtype).eps
    assert epsilon / 2 * due.norm <= due.noise[0] < 8 * epsilon * due.norm


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_honest_row_parallel_layers_pass(dtype: str, pieces: int) -> None:
    rejected = 0
    for seed in range(40):
        program, module, x = linear(dtype, seed)
        reference = low_reference(program, f"linear {seed}", dtype, spread=1.0)
        result = row_parallel(module, x, pieces)
        judgement = judge(reference, {"output": result})
        assert judgement.verdict == "pass", judgement.findings
        assert 0 < judgement.sensitivity < 40 * torch.finfo(x.dtype).eps
        try:
            torch.testing.assert_close(result, module(x).detach())
        except AssertionError:
            rejected += 1
    if dtype != "float32":
        assert rejected  # what this is for: the usual tolerances call honest layers wrong


@pytest.mark.parametrize("dtype", LOW)
def test_a_bias_that_every_rank_adds_is_found(dtype: str) -> None:
    for seed in range(20):
        program, module, x = linear(dtype, seed)
        reference = low_reference(program, f"linear {seed}", dtype, spread=1.0)
        assert judge(reference, {"output": row_parallel(module, x, 4, biases=4)}).verdict == "wrong value"


def test_one_wrong_element_is_found_by_the_largest_error() -> None:
    program, module, x = linear("bfloat16", 1)
    reference = low_reference(program, "linear", "bfloat16", spread=1.0)
    result = module(x).detach()
    assert judge(reference, {"output": result}).verdict == "pass"
    due = reference.quantities["output"]
    result[3, 5] += 10 * due.noise[1]
    assert judge(reference, {"output": result}).verdict == "wrong value"


def test_labels_are_not_moved() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.hinge_embedding_loss(x, y)

    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.bfloat16)
    y = torch.randint(0, 2, (6, 4)).to(x.dtype) * 2 - 1
    due = low_reference(Program(loss, (x, y), names=("x", "y")), "hinge", "bfloat16", spread=1.0)
    assert due.quantities["output"].noise[0] < 0.05 * due.quantities["output"].norm


def test_pieces_that_are_larger_than_their_sum_make_more_noise() -> None:
    program, _, _ = linear("bfloat16", 2)
    small, large = (
        low_reference(program, "linear", "bfloat16", spread=spread).quantities["output"].noise[0]
        for spread in (1.0, 16.0)
    )
    assert large > 4 * small


def test_what_cancels_in_float64_is_noise_and_not_wrong() -> None:
    torch.manual_seed(0)

    def cancels(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + bias, -1)

    x = torch.randn(8, 16, dtype=torch.float64)
    bias = torch.randn(8, 1, dtype=torch.float64, requires_grad=True)
    program = Program(cancels, (x, bias), names=("x", "bias"))
    plain = compute_reference(program, "softmax")
    due = plain.quantities["bias.grad"]
    assert 0 < due.norm < 1e-14
    other = torch.from_numpy(np.asarray(due.value) + 0.5 * due.norm / np.sqrt(8))
    assert judge(plain, {"bias.grad": other}).verdict == "wrong gradient"
    reference = with_noise_of_cancelled(plain, program, "softmax")
    assert judge(reference, {"bias.grad": other}).verdict == "noise"
    assert judge(reference, {"bias.grad": other + 1e-12}).verdict == "wrong gradient"
    assert reference.quantities["output"].noise == (0.0, 0.0)


def test_nothing_but_zeros_is_no_pass() -> None:
    def gone(x: torch.Tensor) -> torch.Tensor:
        return x * 0

    program = Program(gone, (torch.randn(4, 3, dtype=torch.float64, requires_grad=True),), names=("x",))
    reference = compute_reference(program, "gone")
    zeros = torch.zeros(4, 3, dtype=torch.float64)
    judgement = judge(reference, {"output": zeros, "x.grad": zeros})
    assert judgement.verdict == "no signal" and judgement.silent == ("output", "x.grad")

    def kept(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y * 0

    inputs = tuple(torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    reference = compute_reference(Program(kept, inputs, names=("x", "y")), "kept")
    found = {name: torch.from_numpy(np.array(due.value)) for name, due in reference.quantities.items()}
    judgement = judge(reference, found)
    assert judgement.verdict == "pass" and judgement.silent == ("y.grad",)


def test_what_overflows_on_one_device_already_says_nothing() -> None:
    program = Program(torch.exp, (torch.tensor([1.0, 30.0], dtype=torch.float16),), names=("x",))
    reference = low_reference(program, "exp", "float16", spread=1.0)
    found = {"output": torch.tensor([7.0, float("inf")], dtype=torch.float16)}
    judgement = judge(reference, found, ranks=2)
    assert judgement.verdict == "no signal" and judgement.silent == ("output",)
    assert not judgement.noise and judgement.sensitivity == 0
