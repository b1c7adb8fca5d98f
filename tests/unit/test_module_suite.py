"""The module suite: what it yields, and that its cases are the same in every process."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from sbp.oracle.reference import compute_reference
from sbp.placement import Mesh
from sbp.plan import PlanOptions
from sbp.program import to_numpy
from sbp.suites.module_cases import CASES
from sbp.suites.module_database import entries
from sbp.suites.modules import SUITE

FEW = PlanOptions((Mesh((4,)),), rows=6)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="counts of torch 2.13")
def test_the_database_yields_what_torch_2_13_has() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(entries())
    assert len(found) == 1795
    assert len({entry.module for entry in found}) == 108
    assert sum(len(entry.modes) for entry in found) == 2057


def test_own_cases_build_in_float64_and_have_signal() -> None:
    for case in CASES:
        program = SUITE.build(case, "float64", "cpu")
        floating = [tensor for tensor in program.tensors().values() if tensor.is_floating_point()]
        assert floating and all(tensor.dtype == torch.float64 for tensor in floating)
        for name, parameter in program.parameters().items():
            assert not torch.all(parameter == parameter.flatten()[0]) or parameter.numel() == 1, (case, name)
        reference = compute_reference(program, case)
        assert any(quantity.norm > 0 for quantity in reference.quantities.values()), case


def test_running_statistics_and_gradients_are_among_the_quantities() -> None:
    case = "BatchNorm2d(8):4x8x2x4:train"
    quantities = compute_reference(SUITE.build(case, "float64", "cpu"), case).quantities
    assert list(quantities) == [
        "output",
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "input.grad",
        "weight.grad",
        "bias.grad",
    ]
    program = SUITE.build(case, "float64", "cpu")
    data = to_numpy(program.inputs()["input"])
    # The running variance is the unbiased one; momentum 0.1 is torch's default.
    unbiased = data.var(axis=(0, 2, 3), ddof=1)
    before = to_numpy(program.buffers()["running_var"])
    assert np.allclose(quantities["running_var"].value, 0.9 * before + 0.1 * unbiased)


def test_training_compares_parameters_and_optimizer_state() -> None:
    trials = [trial for trial in SUITE.plan("Linear(8,12):4x8", FEW) if trial.kind == "train"]
    assert {trial.options["optimizer"] for trial in trials} == {"SGD", "AdamW"}
    trial = next(trial for trial in trials if trial.options["optimizer"] == "AdamW")
    program = SUITE.build(trial.case, "float64", "cpu")
    names = compute_reference(program, trial.case, SUITE.make_optimizer(trial)).quantities
    assert {"weight after step 3", "exp_avg of bias after step 1", "weight.grad of step 2"} <= set(names)


def test_ids_are_unique_and_the_same_in_another_process() -> None:
    program = (
        "from sbp.suites.modules import SUITE\n"
        "from sbp.plan import PlanOptions\nfrom sbp.placement import Mesh\n"
        "for case in ['Linear(8,12):4x8', 'MLP(6,10):5x6']:\n"
        "    for trial in SUITE.plan(case, PlanOptions((Mesh((4,)), Mesh((2, 2))))):\n"
        "        print(trial.id)\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == len(runs[0]) > 100


def test_a_random_module_is_left_out_with_its_reason() -> None:
    class Noisy(torch.nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + torch.rand_like(input)

    CASES["Noisy"] = lambda: (Noisy(), (torch.ones(2, 3, requires_grad=True),), {})
    try:
        assert list(SUITE.plan("Noisy", FEW)) == []
        assert SUITE.skipped.pop("Noisy").startswith("random")
    finally:
        del CASES["Noisy"]
