"""A vocabulary that is split over the ranks: the embedding, the head, and the loss over the classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import Planted, copy_to_ranks, sum_over_ranks
from torch import nn

from sbp import Case, Parallel, Train, World, call, padded

__all__ = ["CASES"]

PLANTED = Planted()


class PartEmbedding(nn.Module):
    """``rows`` rows of the table on each rank."""

    def __init__(self, rows: int, dim: int, world: World, fault: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))
        self.rows, self.world, self.fault = rows, world, fault

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rank, rows = self.world.rank, self.rows
        first = rows * (self.world.size - 1 - rank if self.fault == "rank_order" else rank)
        low, high = first + (self.fault == "mask_low"), first + rows - (self.fault == "mask_high")
        elsewhere = (tokens < low) | (tokens >= high)
        if self.fault == "mask_one_more":
            elsewhere = (tokens < first) | (tokens > first + rows)
        own = (tokens - first).clamp(0, rows - 1)
        found = F.embedding(own, self.weight)
        if self.fault != "no_mask":
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return sum_over_ranks(found, self.world)


def embedding(fault: str) -> Case:
    return Case(
        f"embedding-{fault}",
        lambda: (nn.Embedding(12, 4), torch.arange(12).reshape(3, 4)),
        spmd=lambda module, world: PartEmbedding(3, 4, world, fault),
        placements={"weight": "S(0)"},
    )


PLANTED.plant(
    embedding,
    {
        "rank_order": ("wrong rank order", "output"),
        "mask_low": ("embedding mask off by one", "output"),
        "mask_high": ("embedding mask off by one", "output"),
        "mask_one_more": ("embedding mask off by one", "output"),
        "no_mask": ("embedding mask off by one", "output"),
    },
)

SMOOTHING = 0.1
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def parallel_loss(classes: int, world: World, fault: str) -> Loss:
    """Cross-entropy of logits of which each rank has some classes; those from ``classes`` on are padding."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = logits.shape[-1]
        first = own * world.rank
        real = torch.arange(first, first + own) < classes
        # Enough for any logits of the padding to count for nothing.
        seen = logits if fault == "padding_in_sum" else logits.masked_fill(~real, -1e30)
        largest = seen.detach().amax(-1, keepdim=True)
        if fault != "own_largest":
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        total = seen.sub(largest).exp().sum(-1)
        if fault != "own_total":
            total = sum_over_ranks(total, world)
        here = (labels >= first) & (labels < first + own)
        if fault == "label_off_by_one":
            here = (labels > first) & (labels < first + own)
        picked = logits.gather(-1, (labels - first).clamp(0, own - 1).unsqueeze(-1)).squeeze(-1)
        picked = sum_over_ranks(picked * here, world)
        every = (logits * real).sum(-1)
        if fault == "smoothing_over_own_classes":
            smooth = every / real.sum()
        elif fault == "smoothing_over_own_count":
            smooth = sum_over_ranks(every, world) / real.sum()
        elif fault == "smoothing_over_padding":
            smooth = sum_over_ranks(every, world) / (own * world.size)
        else:
            smooth = sum_over_ranks(every, world) / classes
        score = (1 - SMOOTHING) * picked + SMOOTHING * smooth
        return (largest.squeeze(-1) + total.log() - score).mean()

    return loss


class PartHead(nn.Module):
    def __init__(self, module: nn.Linear, world: World) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(module.out_features // world.size, module.in_features))
        self.world = world

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(copy_to_ranks(input, self.world), self.weight)


def smoothed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, label_smoothing=SMOOTHING)


def head(fault: str) -> Case:
    return Case(
        f"head-{fault}",
        lambda: call(nn.Linear(6, 12, bias=False), torch.randn(12, 6, requires_grad=True)).against(
            torch.randperm(12)
        ),
        spmd=lambda module, world: Parallel(PartHead(module, world), loss=parallel_loss(12, world, fault)),
        placements={"weight": "S(0)", "output": "S(1)"},
        loss=smoothed,
    )


PLANTED.plant(
    head,
    {
        "own_largest": ("forward all-reduce: missing", "loss"),
        "own_total": ("forward all-reduce: missing", "loss"),
        "label_off_by_one": ("embedding mask off by one", "loss"),
        "smoothing_over_own_classes": ("label smoothing over the local classes", "loss"),
        "smoothing_over_own_count": ("label smoothing over the local classes", "loss"),
    },
)

VOCABULARY, ROWS = 13, 4  # 16 rows on 4 ranks, 3 of them padding


class TiedModel(nn.Module):
    """From tokens and labels to the loss. The head uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return smoothed(self.head(torch.tanh(self.embedding(tokens))), labels)


class PartTiedModel(nn.Module):
    def __init__(self, world: World, fault: str) -> None:
        super().__init__()
        self.table = PartEmbedding(ROWS, 6, world, fault)
        if fault == "untied":
            self.head_weight = nn.Parameter(torch.empty(ROWS, 6))
        self.loss = parallel_loss(VOCABULARY, world, fault)
        self.world, self.fault = world, fault

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = self.head_weight if self.fault == "untied" else self.table.weight
        if self.fault == "head_detached":
            weight = weight.detach()
        x = copy_to_ranks(torch.tanh(self.table(tokens)), self.world)
        return self.loss(F.linear(x, weight), labels)


def tied(fault: str) -> Case:
    table = padded("embedding.weight", to=4 * ROWS)
    parameters = {"table.weight": table}
    if fault == "untied":
        parameters["head_weight"] = table
    return Case(
        f"tied-{fault}",
        lambda: (TiedModel(), torch.randperm(VOCABULARY), torch.randperm(VOCABULARY)),
        spmd=lambda module, world: PartTiedModel(world, fault),
        placements={"embedding.weight": "S(0)"},
        parameters=parameters,
        train=Train(steps=2),
    )


PLANTED.plant(
    tied,
    {
        "untied": ("tied weights untied", "embedding.weight.grad"),
        "head_detached": ("tied weights untied", "embedding.weight.grad"),
        "padding_in_sum": ("vocabulary padding in the loss", "output"),
        "smoothing_over_padding": ("vocabulary padding in the loss", "output"),
    },
)

CASES = list(PLANTED.cases())
