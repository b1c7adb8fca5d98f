"""An optimizer, an average of the weights and a gradient scaler, written by hand."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["beta"]).add_(p.grad)
                p.sub_(group["lr"] * state["momentum"].sign())


class Average:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.count = 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        self.count += 1
        for name, p in model.named_parameters():
            self.shadow[name].mul_(self.decay)
            self.shadow[name] += (1 - self.decay) * p

    def copy_to(self, model):
        for name, p in model.named_parameters():
            p.data.copy_(self.shadow[name])


class Linear(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))

    def forward(self, x):
        y = x @ self.weight.t()
        y += self.bias
        return y


def scale_gradients(parameters, scale):
    grads = [p.grad for p in parameters if p.grad is not None]
    for g in grads:
        g.mul_(scale)
    torch._foreach_mul_(grads, 1.0)
    return grads


def reset(model: Linear):
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()


def run(mesh):
    torch.manual_seed(0)
    model = Linear(mesh)
    reset(model)
    average = Average(model)
    optimizer = SignMomentum(model.parameters())
    x = distribute_tensor(torch.randn(3, 8), mesh)
    for _ in range(2):
        model(x).square().mean().backward()
        scale_gradients(list(model.parameters()), 0.5)
        optimizer.step()
        average.update(model)
        for p in model.parameters():
            p.grad.zero_()
    average.copy_to(model)
    weight: DTensor = model.weight
    with torch.no_grad():
        weight[:2].mul_(2)
        weight.data = weight.data * 1
    return model
