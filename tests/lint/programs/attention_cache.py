"""Attention with a mask, rotary embeddings and a cache that is written in place."""

import math

import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary(q, k, cos, sin):
    q_out = q * cos
    q_out += rotate_half(q) * sin
    k_out = k * cos
    k_out.addcmul_(rotate_half(k), sin)
    return q_out, k_out


class Cache:
    def __init__(self):
        self.keys = None
        self.values = None
        self.length = 0

    def update(self, k, v):
        if self.keys is None:
            self.keys, self.values = torch.clone(k), torch.clone(v)
        else:
            self.keys.copy_(k)
            self.values.lerp_(v, 0.5)
        self.length += k.shape[-2]
        return self.keys, self.values


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos, sin, mask=None, cache: Cache = None):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = apply_rotary(q, k, cos, sin)
        if cache is not None:
            k, v = cache.update(k.detach(), v.detach())
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores /= math.sqrt(width)
        if mask is not None:
            scores.masked_fill_(mask, -1e9)
        weights = torch.softmax(scores, dim=-1)
        out = torch.matmul(weights, v)
        return self.out(out)


class Decoder(nn.Module):
    def __init__(self, width=8, heads=2, depth=2):
        super().__init__()
        self.layers = nn.ModuleList([Attention(width, heads) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])

    def forward(self, x, cos, sin, mask, caches):
        for layer, norm, cache in zip(self.layers, self.norms, caches):
            h = layer(norm(x), cos, sin, mask, cache)
            h.add_(x)
            x = h
        return x


def run(mesh):
    torch.manual_seed(0)

    def spread(t):
        return distribute_tensor(t, mesh, [Replicate()])

    net = distribute_module(Decoder(), mesh)
    x = spread(torch.randn(2, 3, 8))
    cos, sin = spread(torch.randn(3, 8)), spread(torch.randn(3, 8))
    mask = spread(torch.ones(3, 3, dtype=torch.bool).triu(1))
    caches = [Cache(), Cache()]
    with torch.no_grad():
        for _ in range(2):
            out = net(x, cos, sin, mask, caches)
    out.clamp_(-1, 1)
    return out
