"""Per-rank code that works on the local pieces of distributed tensors."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def local_of(x):
    return x.to_local() if isinstance(x, DTensor) else x


def add_noise(x: DTensor, amount: float):
    local = x.to_local()
    local.add_(amount)
    local[0] = 0
    return x


def clear_rows(x, rows):
    piece = local_of(x)
    for row in range(rows):
        piece[row].zero_()
    piece.view(-1)[:2] += 1


class Table:
    def __init__(self, mesh):
        self.rows = distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)])
        self.hits = 0

    def write(self, values):
        self.hits += 1
        with torch.no_grad():
            self.rows._local_tensor.copy_(values)
            torch.mul(self.rows, 2, out=self.rows)

    def normalise(self):
        norm = self.rows.norm() + 1e-6
        self.rows /= norm


def accumulate(pieces, mesh):
    total = distribute_tensor(torch.zeros(3), mesh, [Replicate()])
    for piece in pieces:
        total += DTensor.from_local(piece, mesh, [Replicate()])
    count = len(pieces)
    count += 1
    total.div_(count)
    return total


def run(mesh):
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
    add_noise(x, 0.1)
    clear_rows(x, 2)
    table = Table(mesh)
    table.write(torch.ones(6, 3))
    table.normalise()
    y = accumulate([torch.ones(3), torch.ones(3)], mesh)
    z = y.redistribute(mesh, [Shard(0)])
    z **= 2
    z.relu_()
    torch.relu_(z)
    pair = [y, z]
    for t in pair:
        t.sigmoid_()
    torch._foreach_neg_(pair)
    return x, table, y
