"""Data parallel plans: DDP, FSDP2, HSDP, and two-dimensional ones with tensor parallelism.

python -m sbp.run -n 4 examples/data_parallel.py
"""

from __future__ import annotations

import torch
from models import MLP, Transformer, next_token_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sbp import Train, call, case

# Each rank has its part of the batch, and so its part of the result.
BATCH = {name: {"dp": "S(0)"} for name in ("x", "target", "output")}
TOKENS = {name: {"dp": "S(0)"} for name in ("tokens", "target", "output")}
TRAIN = Train(steps=3, optimizer="AdamW", accumulate=2)


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def regression():
    return call(MLP(8, 16), torch.randn(8, 8, requires_grad=True)).against(torch.randn(8, 8))


data_parallel = {
    "axes": ("dp",),
    "mean_over": "dp",
    "placements": BATCH,
    "loss": nn.functional.mse_loss,
    "train": TRAIN,
}
mlp_ddp = case(name="mlp_ddp", plan=ddp, **data_parallel)(regression)


def fsdp(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every layer of its own, then the rest: parameters are gathered layer by layer."""
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)


mlp_fsdp = mlp_ddp.variant("mlp_fsdp", plan=fsdp)

# The same plan on a mesh of two axes: sharded along one, replicated along the other.
mlp_hsdp = mlp_ddp.variant(
    "mlp_hsdp",
    plan=fsdp,
    axes=("replicate", "shard"),
    mean_over=("replicate", "shard"),
    placements={name: {"replicate": "S(0)", "shard": "S(0)"} for name in BATCH},
)


def blocks_fsdp(module: nn.Module, mesh: DeviceMesh) -> None:
    for block in module.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def language_model():
    tokens = torch.randint(16, (4, 7))
    return call(Transformer(), tokens[:, :-1]).against(tokens[:, 1:])


transformer_fsdp = case(
    name="transformer_fsdp",
    plan=blocks_fsdp,
    axes=("dp",),
    mean_over="dp",
    placements=TOKENS,
    loss=next_token_loss,
    train=Train(steps=2, optimizer="AdamW", clip_norm=0.5),
)(language_model)

# Saved after the first step, loaded into a new model.
transformer_saved = transformer_fsdp.variant(
    "transformer_saved", train=Train(steps=2, optimizer="AdamW", save_after=1)
)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    for block in module.layers:
        plan = {
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(module, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def fsdp_and_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel within a block of ranks, FSDP across them."""
    tensor_parallel(module, mesh["tp"])
    blocks_fsdp(module, mesh["dp"])


transformer_2d = transformer_fsdp.variant(
    "transformer_2d",
    plan=fsdp_and_tensor_parallel,
    axes=("dp", "tp"),
    train=Train(steps=2, optimizer="AdamW"),
)

# Trained under FSDP, saved, and loaded into the two-dimensional plan.
transformer_moved = transformer_fsdp.variant(
    "transformer_moved",
    train=Train(steps=2, optimizer="AdamW", save_after=1, load_into=transformer_2d, load_on="2x2"),
    meshes=("4",),
)
