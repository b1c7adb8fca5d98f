"""A test file as a user would write it; copied to a folder of its own by test_pytest_plugin.py."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sbp import Train, case


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def megatron(module, mesh):
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def doubled(module, mesh):
    module.up.weight.data *= 2
    return megatron(module, mesh)


def refused(module, mesh):
    raise NotImplementedError("this plan does not support meshes")


@case(placements={"weight": "B", "bias": "B", "grad_output": "B"})
def test_linear():
    return nn.Linear(8, 6), torch.randn(4, 8, requires_grad=True)


@case(plan=megatron, train=Train(steps=1, optimizer=["SGD", "AdamW"]))
@pytest.mark.chosen
def test_mlp():
    return MLP(), torch.randn(4, 8, requires_grad=True)


test_doubled = test_mlp.variant("test_doubled", plan=doubled, train=None)
test_refused = test_doubled.variant("test_refused", plan=refused)
test_known = test_doubled.variant("test_known")
test_several = [
    test_mlp.variant("one", train=None),
    test_mlp.variant("other", train=None, axes=("a", "b"), plan=lambda m, mesh: megatron(m, mesh["b"])),
]
helper = test_mlp.variant("helper")


def test_fixture(conforms):
    conforms(nn.LayerNorm(8), torch.randn(4, 8), level="quick")


def test_fixture_fails(conforms):
    conforms(MLP(), torch.randn(4, 8), plan=doubled)


def test_of_the_usual_kind():
    assert True
