"""What else a training step may have: recomputed activations, autocast, torch.compile, schedules, other optimizers, and
checkpoints that are loaded on another mesh.

    python -m sbp.run -n 4 examples/training.py
"""

from __future__ import annotations

from functools import partial

import torch
from data_parallel import blocks_fsdp, mlp_fsdp, transformer_fsdp
from tensor_parallel import mlp_training
from torch.optim.lr_scheduler import CosineAnnealingLR

from sbp import Train

recomputed = transformer_fsdp.variant("recomputed", recompute="layers.*")

in_bfloat16 = mlp_fsdp.variant("in_bfloat16", autocast="bfloat16", train=Train(steps=2, optimizer="AdamW"))

compiled = mlp_training.variant("compiled", compile="aot_eager", train=Train(steps=2, optimizer="AdamW"))

scheduled = mlp_training.variant(
    "scheduled",
    train=Train(
        steps=4,
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        schedule=partial(CosineAnnealingLR, T_max=4),
        save_after=2,
    ),
)

some_optimizers = mlp_training.variant(
    "some_optimizers",
    train=Train(
        steps=2, optimizer=("SGD:nesterov", "Adam:amsgrad:foreach", "AdamW:fused", "RMSprop:centered")
    ),
)

# Sharded along one axis and replicated along the other, then the other way round.
other_mesh = transformer_fsdp.variant(
    "other_mesh",
    plan=blocks_fsdp,
    axes=("replicate", "shard"),
    mean_over=("replicate", "shard"),
    placements={name: {"replicate": "S(0)", "shard": "S(0)"} for name in ("tokens", "target", "output")},
    meshes=("2x2",),
    train=Train(steps=2, optimizer="AdamW", save_after=1, load_on="1x4"),
)

__all__ = ["compiled", "in_bfloat16", "other_mesh", "recomputed", "scheduled", "some_optimizers"]
