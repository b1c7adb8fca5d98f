"""Module cases that torch's module database lacks: each a function that returns the module and its arguments.

Sizes are small. Most cases come with sizes that divide a mesh of 2 or 4 and with sizes that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[], Built]] = {}


def _add(name: str, build: Callable[[], Built]) -> None:
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    CASES[name] = build


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Built:
    return module, args, kwargs


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _indices(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


# ------------------------------------------------------------------------------------------ normalisation

_NORM_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ",affine=False": {"affine": False},
    ",momentum=None": {"momentum": None},
    ",momentum=0.3": {"momentum": 0.3},
    ",track_running_stats=False": {"track_running_stats": False},
}
for _mode in ("train", "eval"):
    for _words, _options in _NORM_OPTIONS.items():
        for _name, _module, _shape in (
            ("BatchNorm1d", nn.BatchNorm1d, (8, 4)),
            ("BatchNorm1d", nn.BatchNorm1d, (6, 5, 3)),
            ("BatchNorm2d", nn.BatchNorm2d, (4, 8, 2, 4)),
            ("BatchNorm3d", nn.BatchNorm3d, (4, 3, 2, 2, 2)),
        ):
            if _name == "BatchNorm3d" and _words not in ("", ",affine=False"):
                continue
            if _mode == "eval" and _words not in ("", ",affine=False", ",track_running_stats=False"):
                continue
            _case = f"{_name}({_shape[1]}{_words}):{'x'.join(map(str, _shape))}:{_mode}"
            _add(
                _case,
                lambda module=_module, shape=_shape, options=_options, mode=_mode: _call(
                    module(shape[1], **options).train(mode == "train"), _randn(*shape)
                ),
            )
# In training it wants a GPU; what it does in evaluation is checked everywhere.
_add("SyncBatchNorm(4):8x4x3:eval", lambda: _call(nn.SyncBatchNorm(4).eval(), _randn(8, 4, 3)))
_add("LayerNorm(8):4x6x8", lambda: _call(nn.LayerNorm(8), _randn(4, 6, 8)))
_add("LayerNorm((6,8)):4x6x8", lambda: _call(nn.LayerNorm((6, 8)), _randn(4, 6, 8)))
_add("RMSNorm(8):4x6x8", lambda: _call(nn.RMSNorm(8), _randn(4, 6, 8)))
_add("GroupNorm(4,8):4x8x3", lambda: _call(nn.GroupNorm(4, 8), _randn(4, 8, 3)))
_add("InstanceNorm2d(4,affine):4x4x3x5", lambda: _call(nn.InstanceNorm2d(4, affine=True), _randn(4, 4, 3, 5)))

# ---------------------------------------------------------------------------------------------- embedding

for _words, _options in {
    "": {},
    ",padding_idx=2": {"padding_idx": 2},
    ",max_norm=1.0": {"max_norm": 1.0},
    ",scale_grad_by_freq": {"scale_grad_by_freq": True},
}.items():
    for _rows, _shape in ((12, (8, 4)), (10, (5, 3))):
        _add(
            f"Embedding({_rows},8{_words}):{'x'.join(map(str, _shape))}",
            lambda rows=_rows, shape=_shape, options=_options: _call(
                nn.Embedding(rows, 8, **options), _indices(rows, *shape)
            ),
        )

# ------------------------------------------------------------------------------------------------- losses

_REDUCTIONS = ("mean", "sum", "none")


def _probabilities(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64).mul(0.9).add(0.05)


for _reduction in _REDUCTIONS:
    for _name, _loss in (
        ("MSELoss", nn.MSELoss),
        ("L1Loss", nn.L1Loss),
        ("SmoothL1Loss", nn.SmoothL1Loss),
        ("HuberLoss", nn.HuberLoss),
    ):
        for _shape in ((8, 4), (6, 5)):
            _add(
                f"{_name}({_reduction}):{'x'.join(map(str, _shape))}",
                lambda loss=_loss, reduction=_reduction, shape=_shape: _call(
                    loss(reduction=reduction), _randn(*shape), _randn(*shape)
                ),
            )
    _add(
        f"BCELoss({_reduction}):8x4",
        lambda reduction=_reduction: _call(
            nn.BCELoss(reduction=reduction),
            _probabilities(8, 4).requires_grad_(),
            _probabilities(8, 4),
        ),
    )
    _add(
        f"BCEWithLogitsLoss({_reduction},weight,pos_weight):8x4",
        lambda reduction=_reduction: _call(
            nn.BCEWithLogitsLoss(
                weight=_probabilities(4), pos_weight=_probabilities(4), reduction=reduction
            ),
            _randn(8, 4),
            _probabilities(8, 4),
        ),
    )
    _add(
        f"KLDivLoss({_reduction}):8x4",
        lambda reduction=_reduction: _call(
            nn.KLDivLoss(reduction=reduction), _randn(8, 4), _probabilities(8, 4)
        ),
    )
    for _words, _options in {
        "": {},
        ",weight": {"weight": True},
        ",ignore_index=1": {"ignore_index": 1},
        ",label_smoothing=0.1": {"label_smoothing": 0.1},
        ",weight,label_smoothing=0.1": {"weight": True, "label_smoothing": 0.1},
    }.items():

        def _cross_entropy(
            reduction: str = _reduction, options: dict[str, Any] = _options, rows: int = 8, classes: int = 5
        ) -> Built:
            keywords = dict(options)
            if keywords.pop("weight", False):
                keywords["weight"] = _probabilities(classes)
            # Every class occurs, and not equally often: weights and ignored classes must show.
            target = torch.tensor([0, 1, 1, 4, 2, 3, 1, 4])[:rows]
            return _call(nn.CrossEntropyLoss(reduction=reduction, **keywords), _randn(rows, classes), target)

        _add(f"CrossEntropyLoss({_reduction}{_words}):8x5", _cross_entropy)
        if not _words or _reduction == "mean":
            _add(
                f"CrossEntropyLoss({_reduction}{_words}):6x5",
                lambda build=_cross_entropy: build(rows=6),
            )
    _add(
        f"NLLLoss({_reduction},weight,ignore_index=1):8x5",
        lambda reduction=_reduction: _call(
            nn.NLLLoss(weight=_probabilities(5), ignore_index=1, reduction=reduction),
            _randn(8, 5),
            torch.tensor([0, 1, 1, 4, 2, 3, 1, 4]),
        ),
    )

# ------------------------------------------------------------------------------------------------- blocks


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(input)))


class Attention(nn.Module):
    """Causal multi-head attention through scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        batch, length, width = input.shape

        def split_heads(states: torch.Tensor) -> torch.Tensor:
            return states.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        mixed = nn.functional.scaled_dot_product_attention(
            split_heads(self.query(input)),
            split_heads(self.key(input)),
            split_heads(self.value(input)),
            is_causal=True,
        )
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: attention and an MLP, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, 2 * width)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = input + self.attention(self.norm1(input))
        return input + self.mlp(self.norm2(input))


class ResNetBlock(nn.Module):
    """Basic residual block with batch norm and a strided shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.relu(self.bn1(self.conv1(input)))
        return nn.functional.relu(self.bn2(self.conv2(hidden)) + self.shortcut(input))


_add("Linear(8,12):4x8", lambda: _call(nn.Linear(8, 12), _randn(4, 8)))
_add("Linear(6,10):5x3x6", lambda: _call(nn.Linear(6, 10), _randn(5, 3, 6)))
_add("Conv2d(4,8,3,padding=1):4x4x8x8", lambda: _call(nn.Conv2d(4, 8, 3, padding=1), _randn(4, 4, 8, 8)))
_add(
    "Conv2d(4,4,3,groups=4):4x4x6x5",
    lambda: _call(nn.Conv2d(4, 4, 3, groups=4), _randn(4, 4, 6, 5)),
)
_add("MLP(8,16):4x3x8", lambda: _call(MLP(8, 16), _randn(4, 3, 8)))
_add("MLP(6,10):5x6", lambda: _call(MLP(6, 10), _randn(5, 6)))
_add("Attention(8,4):4x4x8", lambda: _call(Attention(8, 4), _randn(4, 4, 8)))
_add(
    "MultiheadAttention(8,4):4x3x8",
    lambda: _call(
        nn.MultiheadAttention(8, 4, batch_first=True), _randn(4, 3, 8), _randn(4, 5, 8), _randn(4, 5, 8)
    ),
)
_add("TransformerBlock(8,4):4x4x8", lambda: _call(TransformerBlock(8, 4), _randn(4, 4, 8)))
_add("ResNetBlock(4,8,2):4x4x8x8", lambda: _call(ResNetBlock(4, 8, 2), _randn(4, 4, 8, 8)))
