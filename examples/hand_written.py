"""Hand-written per-rank code, Megatron style: column and row parallel layers, fused q/k/v, a vocabulary with padding
that is split over the ranks, its loss, and attention over a split sequence.

    python -m sbp.run -n 4 examples/hand_written.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import MLP, Attention, next_token_loss
from torch import nn

from sbp import Parallel, Train, World, call, case, fused, padded, transposed

Group = dist.ProcessGroup


class CopyToRanks(torch.autograd.Function):
    """The same tensor on every rank; each rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' tensors, on every rank; each rank's part has the whole gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


class ColumnParallel(nn.Module):
    """Some of the output features on each rank."""

    def __init__(self, inputs: int, outputs: int, group: Group, bias: bool = True) -> None:
        super().__init__()
        own = outputs // group.size()
        self.weight = nn.Parameter(torch.empty(own, inputs))
        self.bias = nn.Parameter(torch.empty(own)) if bias else None
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowParallel(nn.Module):
    """Some of the input features on each rank. The weight is kept transposed; the bias is added once, after the sum."""

    def __init__(self, inputs: int, outputs: int, group: Group, bias: bool = True) -> None:
        super().__init__()
        own = inputs // group.size()
        self.weight_t = nn.Parameter(torch.empty(own, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = SumOverRanks.apply(x @ self.weight_t, self.group)
        return total if self.bias is None else total + self.bias


class ParallelMLP(nn.Module):
    def __init__(self, module: MLP, world: World) -> None:
        super().__init__()
        dim, hidden = module.up.in_features, module.up.out_features
        self.up = ColumnParallel(dim, hidden, world.group())
        self.down = RowParallel(hidden, dim, world.group())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def clip_over_ranks(limit: float, split: set[str], world: World):
    """Clip by the norm over all ranks: what is split counts everywhere, what is replicated once."""

    def clip(module: nn.Module) -> torch.Tensor:
        whole = torch.zeros((), dtype=next(module.parameters()).dtype)
        for name, parameter in module.named_parameters():
            if name in split or world.rank == 0:
                whole += parameter.grad.pow(2).sum()
        dist.all_reduce(whole, group=world.group())
        norm = whole.sqrt()
        for parameter in module.parameters():
            parameter.grad.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    return clip


def parallel_mlp(module: MLP, world: World) -> Parallel:
    mlp = ParallelMLP(module, world)
    clip = clip_over_ranks(0.5, {"up.weight", "up.bias", "down.weight_t"}, world)
    return Parallel(mlp, clip=lambda parameters: clip(mlp))


@case(
    spmd=parallel_mlp,
    placements={"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
    parameters={"down.weight_t": transposed("down.weight")},
    train=Train(steps=3, optimizer=("AdamW", "SGD:momentum"), clip_norm=0.5, save_after=2),
)
def mlp():
    return MLP(8, 16), torch.randn(3, 8, requires_grad=True)


class ParallelAttention(nn.Module):
    """Some of the heads on each rank; q, k and v in one projection."""

    def __init__(self, module: Attention, world: World) -> None:
        super().__init__()
        dim = module.q.in_features
        self.head_dim = module.head_dim
        self.qkv = ColumnParallel(dim, 3 * dim, world.group(), bias=False)
        self.out = RowParallel(dim, dim, world.group(), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


@case(
    spmd=ParallelAttention,
    placements={"q.weight": "S(0)", "k.weight": "S(0)", "v.weight": "S(0)", "out.weight": "S(1)"},
    parameters={
        "qkv.weight": fused("q.weight", "k.weight", "v.weight"),
        "out.weight_t": transposed("out.weight"),
    },
    train=Train(steps=2, optimizer="AdamW"),
)
def attention():
    return Attention(16, head_dim=4), torch.randn(2, 6, 16, requires_grad=True)


class ParallelEmbedding(nn.Module):
    """Some of the vocabulary's rows on each rank; the last rows may be padding."""

    def __init__(self, vocabulary: int, dim: int, world: World) -> None:
        super().__init__()
        self.rows = vocabulary // world.size
        self.first = self.rows * world.rank
        self.weight = nn.Parameter(torch.empty(self.rows, dim))
        self.group = world.group()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.rows)
        own = (tokens - self.first).masked_fill(elsewhere, 0)
        found = F.embedding(own, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return SumOverRanks.apply(found, self.group)


def vocabulary_parallel_loss(vocabulary: int, first: int, group: Group):
    """Cross-entropy of logits whose last dimension is split over the ranks; padding takes no part."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(first, first + logits.shape[-1])
        logits = logits.masked_fill(columns >= vocabulary, float("-inf"))
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)
        total = SumOverRanks.apply(shifted.exp().sum(-1), group)
        elsewhere = (labels < first) | (labels >= first + logits.shape[-1])
        own = (labels - first).masked_fill(elsewhere, 0)
        picked = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        return (total.log() - SumOverRanks.apply(picked, group)).mean()

    return loss


class TiedModel(nn.Module):
    """Tokens and labels to the loss; the head uses the embedding's weight."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.head(torch.tanh(self.embedding(tokens))), labels)


VOCABULARY = 13  # no multiple of any number of ranks: rows of padding follow


def padded_size(ranks: int) -> int:
    return -(-VOCABULARY // (2 * ranks)) * 2 * ranks


class ParallelTiedModel(nn.Module):
    def __init__(self, module: TiedModel, world: World) -> None:
        super().__init__()
        self.table = ParallelEmbedding(padded_size(world.size), module.embedding.embedding_dim, world)
        self.loss = vocabulary_parallel_loss(VOCABULARY, self.table.first, world.group())
        self.group = world.group()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = CopyToRanks.apply(torch.tanh(self.table(tokens)), self.group)
        return self.loss(F.linear(x, self.table.weight), labels)


def tied_model():
    tokens = torch.randint(VOCABULARY, (3, 7))
    return call(TiedModel(VOCABULARY, 8), tokens[:, :-1], tokens[:, 1:])


# How large the padded table is depends on the number of ranks, so there is a case for each.
tied = [
    case(
        name=f"tied_vocabulary_{ranks}",
        spmd=ParallelTiedModel,
        placements={"embedding.weight": "S(0)"},
        parameters={"table.weight": padded("embedding.weight", to=padded_size(ranks))},
        meshes=(str(ranks),),
        train=Train(steps=3, optimizer="AdamW"),
    )(tied_model)
    for ranks in (2, 4)
]


class GatherSequence(torch.autograd.Function):
    """All parts of the sequence on every rank; backward, each rank is given the sum of its part's gradients."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


class ContextParallelAttention(Attention):
    """Each rank has a part of the sequence: its own queries look at everybody's keys and values."""

    def __init__(self, module: Attention, world: World) -> None:
        super().__init__(module.q.in_features, module.head_dim)
        self.world = world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        group = self.world.group()
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        k, v = GatherSequence.apply(k, 2, group), GatherSequence.apply(v, 2, group)
        here = torch.arange(length).unsqueeze(1) + length * self.world.rank
        mask = here >= torch.arange(k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def sum_gradients(module: nn.Module) -> None:
    """Every rank has seen a part of the sequence: the gradients of the replicated weights add up."""
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)


@case(
    spmd=lambda module, world: Parallel(ContextParallelAttention(module, world), synchronise=sum_gradients),
    placements={"x": "S(1)", "output": "S(1)"},
    train=Train(steps=2, optimizer="AdamW"),
)
def context_parallel_attention():
    return Attention(8, head_dim=4), torch.randn(2, 8, 8, requires_grad=True)
