"""A small MLP, its weights split by hand, with the in-place habits of model code."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.act = nn.SiLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        self.calls += 1
        gate = self.act(self.gate(x))
        gate *= self.up(x)
        out = self.down(gate)
        return out


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = GatedMLP(width, 2 * width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        residual = x
        x = self.mlp(self.norm(x))
        x.mul_(self.scale.detach())
        x += residual
        return x


class Net(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, 4))

    def forward(self, x, output_hidden=True):
        hidden = ()
        for block in self.blocks:
            x = block(x)
            if output_hidden:
                hidden += (x,)
        pooled = torch.zeros_like(x)
        for h in hidden:
            pooled += h
        pooled /= len(hidden)
        return self.head(pooled)


def run(mesh):
    torch.manual_seed(0)
    net = distribute_module(Net(), mesh)
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    target = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    running = 0.0
    total = 0
    for _ in range(2):
        loss = F.mse_loss(net(x), target)
        loss.backward()
        total += loss.detach()
        running += loss.item()
        for p in net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    total /= 2
    return total
