"""An autograd function, hooks, checkpoints and a mixture of experts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        y = x.clone()
        y *= factor
        return y

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.mul_(ctx.factor)
        return grad, None


class Router(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.bias = nn.Parameter(torch.zeros(experts))

    def forward(self, x):
        logits = self.gate(x)
        logits += self.bias
        weights = F.softmax(logits, dim=-1)
        top = weights.amax(dim=-1, keepdim=True)
        weights = weights * (weights >= top)
        total = weights.sum(dim=-1, keepdim=True)
        total.clamp_(min=1e-6)
        weights /= total
        return weights


class Mixture(nn.Module):
    def __init__(self, width=4, experts=3):
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.load = None

    def mix(self, x, weights):
        out = None
        for index, expert in enumerate(self.experts):
            part = expert(x) * weights[..., index : index + 1]
            if out is None:
                out = part
            else:
                out += part
        return out

    def forward(self, x):
        weights = self.router(x)
        load = weights.detach().mean(dim=0)
        if self.load is None:
            self.load = load
        else:
            self.load.lerp_(load, 0.1)
        x = Scaled.apply(x, 2.0)
        return checkpoint(self.mix, x, weights, use_reentrant=False)


def after(module, inputs, output):
    output.mul_(1.0)
    return output


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture = Mixture()
        self.mixture.register_forward_hook(after)

    def forward(self, x):
        return self.mixture(x)


def run(mesh):
    torch.manual_seed(0)
    net = distribute_module(Wrapped(), mesh)
    x = distribute_tensor(torch.randn(5, 4), mesh, [Replicate()])
    loss = 0
    for _ in range(2):
        loss += net(x).square().mean()
    loss.backward()
    return loss
