"""Tensor and sequence parallel plans: Megatron-style MLP, attention by heads, a whole transformer.

python -m sbp.run -n 4 examples/tensor_parallel.py
"""

from __future__ import annotations

import torch
from models import MLP, Attention, Transformer, next_token_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from sbp import Parallel, Train, call, case


def megatron(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The hidden dimension is split: each rank has some of its columns, then sums the rows' results."""
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@case(plan=megatron)
def mlp():
    return MLP(8, 16), torch.randn(3, 8, requires_grad=True)


mlp_training = mlp.variant("mlp_training", train=Train(steps=3, optimizer="AdamW", clip_norm=0.1))


def by_heads(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank has some of the heads."""
    columns = {name: ColwiseParallel() for name in ("q", "k", "v")}
    return parallelize_module(module, mesh, {**columns, "out": RowwiseParallel()})


@case(plan=by_heads)
def attention():
    return Attention(16, head_dim=4), torch.randn(2, 6, 16, requires_grad=True)


def gathered(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Norms work on a part of the sequence, linear layers on all of it and a part of their width."""
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(module, mesh, plan)


class NormedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = MLP(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


# Each rank is given its part of the sequence, and keeps its part of the result.
@case(plan=gathered, placements={"x": "S(1)", "output": "S(1)"}, train=Train(optimizer="SGD:momentum"))
def sequence_parallel():
    return NormedMLP(), torch.randn(2, 8, 8, requires_grad=True)


def transformer_plan(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel blocks, sequence parallel in between. The tokens are whole on every rank, the logits stay
    split over the vocabulary for the loss."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(len(module.layers)):
        layer = f"layers.{index}"
        plan |= {
            f"{layer}.attention_norm": SequenceParallel(),
            f"{layer}.attention": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            ),
            f"{layer}.attention.q": ColwiseParallel(),
            f"{layer}.attention.k": ColwiseParallel(),
            f"{layer}.attention.v": ColwiseParallel(),
            f"{layer}.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            f"{layer}.mlp_norm": SequenceParallel(),
            f"{layer}.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            f"{layer}.mlp.up": ColwiseParallel(),
            f"{layer}.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(module, mesh, plan)


def with_loss_parallel(module: nn.Module, mesh: DeviceMesh) -> Parallel:
    """The loss is computed on logits that stay split over the vocabulary."""
    return Parallel(transformer_plan(module, mesh), context=lambda *inputs: loss_parallel())


@case(plan=with_loss_parallel, loss=next_token_loss, train=Train(steps=2, optimizer="AdamW"))
def transformer():
    tokens = torch.randint(16, (2, 9))
    return call(Transformer(), tokens[:, :-1]).against(tokens[:, 1:])


def split_weight(module: nn.Module, mesh: DeviceMesh) -> None:
    """distribute_tensor by hand, without a style: the weight's columns are split, the bias is not."""
    weight = distribute_tensor(module.weight, mesh, [Shard(1)])
    module.register_parameter("weight", nn.Parameter(weight))
    module.register_parameter("bias", nn.Parameter(distribute_tensor(module.bias, mesh, [Replicate()])))


@case(plan=split_weight, dtensor_inputs=True, placements={"input": "S(1)", "weight": "S(1)"})
def linear_by_hand():
    return nn.Linear(8, 6), torch.randn(4, 8, requires_grad=True)
