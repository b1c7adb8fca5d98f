"""What a training step is, against loops written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sbp import Train, call, case
from sbp.execute import Quantity, execute, side_of
from sbp.oracle.reference import Reference, compute_reference, draw_cotangent
from sbp.program import Program
from sbp.suites.optimizers import choose, variants
from sbp.suites.users import UserSuite


def model() -> Any:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return call(net, torch.randn(4, 4, requires_grad=True)).against(torch.randn(4, 2))


def built(**settings: Any) -> tuple[Program, Reference, Any]:
    made = case(plan=lambda module, mesh: module, name="c", **settings)(model)
    suite = UserSuite("tests", {"c": made})
    program = suite.build("c", "float64", "cpu")
    assert made.train is not None
    [optimizer] = choose(made.train.optimizer).values()
    return program, compute_reference(program, "c", optimizer), optimizer


def copies(program: Program) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    import copy

    assert program.module is not None
    return copy.deepcopy(program.module), [
        (batch.args[0].detach(), batch.targets[0]) for batch in program.batches
    ]


def assert_same_parameters(reference: Reference, module: nn.Module, after: str) -> None:
    for name, parameter in module.named_parameters():
        found = reference.quantities[f"{name} {after}"].value
        assert found is not None
        np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-12, err_msg=name)


def test_steps_with_accumulation_clipping_and_a_schedule() -> None:
    program, reference, _ = built(
        loss=nn.functional.mse_loss,
        train=Train(
            steps=3,
            accumulate=2,
            clip_norm=0.1,
            optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        ),
    )
    module, batches = copies(program)
    assert len(batches) == 6
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for number in (0, 1):
            x, y = batches[2 * step + number]
            loss = nn.functional.mse_loss(module(x), y)
            (loss / 2).backward()
            name = f"loss of step {step + 1}, batch {number + 1}"
            assert reference.quantities[name].value == pytest.approx(loss.item(), rel=1e-12)
        gradient = reference.quantities[f"0.weight.grad of step {step + 1}"].value
        np.testing.assert_allclose(gradient, module[0].weight.grad.numpy(), rtol=1e-12)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        assert norm > 0.1, "nothing would be clipped"
        assert reference.quantities[f"total norm of step {step + 1}"].value == pytest.approx(norm.item())
        optimizer.step()
        assert_same_parameters(reference, module, f"after step {step + 1}")
        momentum = reference.quantities[f"momentum_buffer of 0.bias after step {step + 1}"].value
        np.testing.assert_allclose(
            momentum, optimizer.state[module[0].bias]["momentum_buffer"].numpy(), rtol=1e-12
        )
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        rate = reference.quantities[f"learning rate 0 after step {step + 1}"].value
        assert rate == pytest.approx(0.5 ** (step + 2))


def test_each_batch_is_another_one() -> None:
    program, _, _ = built(loss=nn.functional.mse_loss, train=Train(steps=2, accumulate=2))
    inputs = [batch.args[0] for batch in program.batches]
    assert len(inputs) == 4 and all(value.requires_grad for value in inputs)
    assert len({value.detach().numpy().tobytes() for value in inputs}) == 4
    again, _, _ = built(loss=nn.functional.mse_loss, train=Train(steps=2, accumulate=2))
    assert torch.equal(again.batches[3].args[0], inputs[3])


def test_without_a_loss_the_micro_batches_share_the_cotangent() -> None:
    program, reference, _ = built(train=Train(steps=1, accumulate=2))
    module, batches = copies(program)
    cotangent = draw_cotangent("c", "output", module(batches[0][0]))
    for x, _ in batches:
        module(x).backward(cotangent / 2)
    gradient = reference.quantities["2.weight.grad of step 1"].value
    np.testing.assert_allclose(gradient, module[2].weight.grad.numpy(), rtol=1e-12)
    assert "output of step 1, batch 2" in reference.quantities


def test_an_optimizer_that_evaluates_several_times() -> None:
    program, reference, _ = built(
        loss=nn.functional.mse_loss, train=Train(steps=2, optimizer="LBFGS:strong_wolfe")
    )
    module, batches = copies(program)
    optimizer = torch.optim.LBFGS(module.parameters(), line_search_fn="strong_wolfe")
    for step, (x, y) in enumerate(batches, 1):
        evaluations = 0

        def evaluate(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(x), y)
            loss.backward()
            return loss

        first = nn.functional.mse_loss(module(x), y).item()
        optimizer.step(evaluate)
        assert evaluations > 1
        assert reference.quantities[f"loss of step {step}"].value == pytest.approx(first, rel=1e-10)
        for name, parameter in module.named_parameters():
            found = reference.quantities[f"{name} after step {step}"].value
            np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-6, err_msg=name)


def test_autocast_takes_forward_pass_and_loss_but_not_the_backward_pass() -> None:
    seen: list[torch.dtype] = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            seen.append(result.dtype)
            return result

    def build() -> Any:
        return call(Layer(4, 2), torch.randn(3, 4)).against(torch.randn(3, 2))

    made = case(name="c", plan=lambda module, mesh: module, autocast="bfloat16", loss=nn.functional.mse_loss)(
        build
    )
    suite = UserSuite("tests", {"c": made})
    reference = compute_reference(suite.build("c", "float32", "cpu"), "c")
    assert seen == [torch.bfloat16]
    assert reference.quantities["weight.grad"].dtype == "float32"


def test_loading_replaces_everything_and_is_looked_at() -> None:
    program, reference, optimizer = built(loss=nn.functional.mse_loss, train=Train(steps=2, save_after=1))
    side = side_of(program, optimizer)
    names: list[str] = []
    calls: list[str] = []

    def reload(old: Any, scheduler: Any) -> Any:
        calls.append("reload")
        return program, optimizer(side.parameters()), None

    side.reload = reload
    observe: Callable[[Quantity, Any], None] = lambda quantity, tensor: names.append(quantity.name)  # noqa: E731
    execute(program, lambda name, output: output, observe, optimizer, side)
    assert calls == ["reload"]
    assert set(names) == set(reference.quantities)
    assert names.index("0.weight after loading (step 1)") > names.index("0.weight after step 1")


# ------------------------------------------------------------------------------------- the optimizers


def test_the_database_of_optimizers_is_read_in_full() -> None:
    """How many there are in torch 2.13; another number means that the adapter has to be looked at again."""
    names = list(variants())
    bare = {name.partition(":")[0] for name in names}
    assert bare == {
        *(
            "ASGD",
            "Adadelta",
            "Adafactor",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "LBFGS",
            "Muon",
            "NAdam",
            "RAdam",
        ),
        *("RMSprop", "Rprop", "SGD", "SparseAdam"),
    }
    foreach = [name for name in names if name.endswith(":foreach")]
    fused = [name for name in names if name.endswith(":fused")]
    assert (len(names), len(foreach), len(fused)) == (192, 75, 26)
    assert {name.partition(":")[0] for name in fused} == {"Adagrad", "Adam", "AdamW", "SGD"}


def test_bare_names_need_no_database_and_mean_the_same() -> None:
    for name in ("SGD", "AdamW", "AdamW:fused", "Adam:foreach", "LBFGS"):
        assert choose(name)[name] == variants()[name]


def test_optimizers_are_chosen_by_name_or_function() -> None:
    chosen = choose(["AdamW", partial(torch.optim.SGD, lr=1), torch.optim.SGD, "SGD:nesterov"])
    assert list(chosen) == ["AdamW", "SGD", "SGD-2", "SGD:nesterov"]
    assert list(choose("all")) == list(variants())
    parameter = nn.Parameter(torch.ones(2))
    group = chosen["SGD:nesterov"]([("p", parameter)]).param_groups[0]
    assert group["nesterov"] and group["momentum"] == 0.9


def test_an_optimizer_is_its_own_even_where_its_rate_is_a_tensor() -> None:
    make = choose("SGD:tensor_lr")["SGD:tensor_lr"]
    one, other = (make([("p", nn.Parameter(torch.ones(2)))]) for _ in range(2))
    one.param_groups[0]["lr"].fill_(7)
    assert other.param_groups[0]["lr"] != 7


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("Adamw", r"there is no optimizer 'Adamw'; did you mean AdamW"),
        ("SGD:fast", "there is no optimizer 'SGD:fast'"),
        ("Optimizer", "there is no optimizer 'Optimizer'"),
        ([], "names no optimizer"),
        (3, "3 is neither a name nor a function"),
    ],
)
def test_an_optimizer_that_there_is_not_is_one_line(wanted: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        choose(wanted)
    assert "\n" not in str(raised.value)
