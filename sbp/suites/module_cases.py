"""Module cases that torch's module database lacks: each a function that returns the module and its arguments.

Sizes are small. Most cases come with sizes that divide a mesh of 2 or 4 and with sizes that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def _batch_norm(module: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], mode: str) -> Built:
    return _call(module(shape[1], **options).train(mode == "train"), _randn(*shape))


_NORM_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ",affine=False": {"affine": False},
    ",momentum=None": {"momentum": None},
    ",momentum=0.3": {"momentum": 0.3},
    ",track_running_stats=False": {"track_running_stats": False},
}
# The lightest rules first: a run's first verdict waits for them.
_add("Linear(8,12):4x8", lambda: _call(nn.Linear(8, 12), _randn(4, 8)))
_add("Linear(6,10):5x3x6", lambda: _call(nn.Linear(6, 10), _randn(5, 3, 6)))

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
            _add(_case, partial(_batch_norm, _module, _shape, _options, _mode))
# In training it wants a GPU; what it does in evaluation is checked everywhere.
_add("SyncBatchNorm(4):8x4x3:eval", lambda: _call(nn.SyncBatchNorm(4).eval(), _randn(8, 4, 3)))
_add("LayerNorm(8):4x6x8", lambda: _call(nn.LayerNorm(8), _randn(4, 6, 8)))
_add("LayerNorm((6,8)):4x6x8", lambda: _call(nn.LayerNorm((6, 8)), _randn(4, 6, 8)))
_add("RMSNorm(8):4x6x8", lambda: _call(nn.RMSNorm(8), _randn(4, 6, 8)))
_add("GroupNorm(4,8):4x8x3", lambda: _call(nn.GroupNorm(4, 8), _randn(4, 8, 3)))
_add("InstanceNorm2d(4,affine):4x4x3x5", lambda: _call(nn.InstanceNorm2d(4, affine=True), _randn(4, 4, 3, 5)))

# ---------------------------------------------------------------------------------------------- embedding


def _embedding(rows: int, shape: tuple[int, ...], options: dict[str, Any]) -> Built:
    return _call(nn.Embedding(rows, 8, **options), _indices(rows, *shape))


_EMBEDDING_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ",padding_idx=2": {"padding_idx": 2},
    ",max_norm=1.0": {"max_norm": 1.0},
    ",scale_grad_by_freq": {"scale_grad_by_freq": True},
}
for _words, _options in _EMBEDDING_OPTIONS.items():
    for _rows, _shape in ((12, (8, 4)), (10, (5, 3))):
        _add(
            f"Embedding({_rows},8{_words}):{'x'.join(map(str, _shape))}",
            partial(_embedding, _rows, _shape, _options),
        )

# ------------------------------------------------------------------------------------------------- losses

_REDUCTIONS = ("mean", "sum", "none")
# Every class occurs, and not equally often: class weights and an ignored class must show.
_CLASSES = (0, 1, 1, 4, 2, 3, 1, 4)


def _probabilities(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64).mul(0.9).add(0.05)


def _regression(loss: type[nn.Module], reduction: str, shape: tuple[int, ...]) -> Built:
    return _call(loss(reduction=reduction), _randn(*shape), _randn(*shape))


def _binary(reduction: str) -> Built:
    return _call(nn.BCELoss(reduction=reduction), _probabilities(8, 4).requires_grad_(), _probabilities(8, 4))


def _binary_with_logits(reduction: str) -> Built:
    loss = nn.BCEWithLogitsLoss(weight=_probabilities(4), pos_weight=_probabilities(4), reduction=reduction)
    return _call(loss, _randn(8, 4), _probabilities(8, 4))


def _divergence(reduction: str) -> Built:
    return _call(nn.KLDivLoss(reduction=reduction), _randn(8, 4), _probabilities(8, 4))


def _cross_entropy(reduction: str, options: dict[str, Any], rows: int) -> Built:
    keywords = {**options, "weight": _probabilities(5) if options.get("weight") else None}
    return _call(
        nn.CrossEntropyLoss(reduction=reduction, **keywords), _randn(rows, 5), torch.tensor(_CLASSES[:rows])
    )


def _likelihood(reduction: str) -> Built:
    loss = nn.NLLLoss(weight=_probabilities(5), ignore_index=1, reduction=reduction)
    return _call(loss, _randn(8, 5), torch.tensor(_CLASSES))


_CROSS_ENTROPY_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ",weight": {"weight": True},
    ",ignore_index=1": {"ignore_index": 1},
    ",label_smoothing=0.1": {"label_smoothing": 0.1},
    ",weight,label_smoothing=0.1": {"weight": True, "label_smoothing": 0.1},
}
for _reduction in _REDUCTIONS:
    for _loss in (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss):
        for _sizes in ((8, 4), (6, 5)):
            _name = f"{_loss.__name__}({_reduction}):{_sizes[0]}x{_sizes[1]}"
            _add(_name, partial(_regression, _loss, _reduction, _sizes))
    _add(f"BCELoss({_reduction}):8x4", partial(_binary, _reduction))
    _add(f"BCEWithLogitsLoss({_reduction},weight,pos_weight):8x4", partial(_binary_with_logits, _reduction))
    _add(f"KLDivLoss({_reduction}):8x4", partial(_divergence, _reduction))
    _add(f"NLLLoss({_reduction},weight,ignore_index=1):8x5", partial(_likelihood, _reduction))
    for _words, _options in _CROSS_ENTROPY_OPTIONS.items():
        for _rows in (8, 6):
            if _rows == 8 or _reduction == "mean" or not _words:
                _name = f"CrossEntropyLoss({_reduction}{_words}):{_rows}x5"
                _add(_name, partial(_cross_entropy, _reduction, _options, _rows))

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
    """Causal multi-head attention: through scaled_dot_product_attention, or written out (``plain``)."""

    def __init__(self, width: int, heads: int, plain: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.plain = plain
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        batch, length, width = input.shape

        def split_heads(states: torch.Tensor) -> torch.Tensor:
            return states.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = (split_heads(layer(input)) for layer in (self.query, self.key, self.value))
        if self.plain:
            scores = query.matmul(key.transpose(-2, -1)) * (width // self.heads) ** -0.5
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(later, -1e9).softmax(-1).matmul(value)
        else:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: attention and an MLP, each with a residual."""

    def __init__(self, width: int, heads: int, plain: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, plain)
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
_add("TransformerBlock(8,4,plain):4x4x8", lambda: _call(TransformerBlock(8, 4, plain=True), _randn(4, 4, 8)))
_add("ResNetBlock(4,8,2):4x4x8x8", lambda: _call(ResNetBlock(4, 8, 2), _randn(4, 4, 8, 8)))
