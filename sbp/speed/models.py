"""The models that are timed, and the plans that split them over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Plan = Callable[[nn.Module, DeviceMesh], nn.Module]


class MLP(nn.Module):
    """Two linear layers with a nonlinearity between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.gelu(self.up(x)))
        return down


class Block(nn.Module):
    """A pre-norm transformer block with causal attention, (batch, length, dim) to the same. The number of heads
    follows from the width of the projections, so that it is right where a rank has only some of the heads."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2016, figure 5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels == 4 * width
            else nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 where ``width`` is 64 and ``blocks`` are (3, 4, 6, 3); narrower and shallower for small sizes.
    Images (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, width: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.stem(images)).mean(dim=(2, 3)))
        return logits


@dataclass(frozen=True)
class Case:
    """A model to time.

    Attributes:
        build: the model, by scale: ``small`` for a laptop's processor, ``large`` for GPUs.
        shape: of one sample of the input, by scale.
        columns, rows: the layers that a tensor parallel plan splits so; empty where there is no such plan.
        parts: into how many equal parts at the most the split layers can be divided, by scale.
    """

    build: Mapping[str, Callable[[], nn.Module]]
    shape: Mapping[str, tuple[int, ...]]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    parts: Mapping[str, int] | None = None


CASES: dict[str, Case] = {
    "mlp": Case(
        {"small": lambda: MLP(256, 1024), "large": lambda: MLP(4096, 16384)},
        {"small": (32, 256), "large": (1024, 4096)},
        columns=("up",),
        rows=("down",),
        parts={"small": 1024, "large": 16384},
    ),
    "transformer": Case(
        {"small": lambda: Block(128, 16), "large": lambda: Block(2048, 128)},
        {"small": (64, 128), "large": (1024, 2048)},
        columns=("query", "key", "value", "mlp.up"),
        rows=("out", "mlp.down"),
        parts={"small": 8, "large": 16},
    ),
    "resnet": Case(
        {
            "small": lambda: ResNet(8, (3, 4, 6, 3), 10),
            "large": lambda: ResNet(64, (3, 4, 6, 3), 1000),
        },
        {"small": (3, 32, 32), "large": (3, 224, 224)},
    ),
}


def data_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank has a part of the batch and the whole model."""
    return DistributedDataParallel(module, process_group=mesh.get_group())


def fully_sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank has a part of the batch and of every parameter; those of a block are gathered when it is due."""
    for child in module.modules():
        if isinstance(child, Bottleneck | Block | MLP) and child is not module:
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def tensor_parallel(case: Case) -> Plan:
    """Each rank has the whole batch, and some columns or rows of the layers."""
    styles = {name: ColwiseParallel() for name in case.columns}
    styles |= {name: RowwiseParallel() for name in case.rows}
    return lambda module, mesh: parallelize_module(module, mesh, styles)


def find_plan(case: Case, name: str) -> tuple[Plan, bool]:
    """The plan of that name for a case, and whether each rank gets only its part of the batch."""
    if name == "tensor parallel":
        return tensor_parallel(case), False
    return {"ddp": data_parallel, "fsdp2": fully_sharded}[name], True


def reason_to_skip(case: Case, name: str, scale: str, ranks: int) -> str:
    """Why a plan does not fit a case on so many ranks; empty where it does."""
    if name != "tensor parallel":
        return ""
    if not case.columns:
        return "torch has no column or row style for convolutions"
    parts = (case.parts or {}).get(scale, 1)
    return "" if parts % ranks == 0 else f"{parts} parts do not divide over {ranks} ranks"


def build(case: Case, scale: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model, with the same weights each time and on each rank."""
    torch.manual_seed(0)
    return case.build[scale]().to(device=device, dtype=dtype)


def draw(case: Case, scale: str, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The whole batch, the same each time and on each rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, *case.shape[scale], generator=generator).to(device=device, dtype=dtype)
