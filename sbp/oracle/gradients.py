"""The gradient of an operator, as an operator of its cotangents and its inputs: so its signatures are found alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sbp.numbers import draw_normal
from sbp.oracle.calls import Call, results
from sbp.trial import stable_seed


def gradient_calls(variants: Sequence[Call], seed: str) -> dict[str, list[Call]]:
    """For each input that has a gradient the call that computes it, in all the variants.

    The first tensor of each call is the cotangent of the first output that has one: a gradient is linear in its
    cotangents, so other outputs would tell nothing new about it.
    """
    found: dict[str, list[Call]] = {}
    for number, call in enumerate(variants):
        for place in range(len(call.tensors)):
            made = _gradient_call(call, place, seed, number)
            if made is not None:
                found.setdefault(f"input {place}", []).append(made)
    return found


def _gradient_call(call: Call, place: int, seed: str, number: int) -> Call | None:
    tensor = call.tensors[place]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    try:
        root = _differentiable_output(call, call.tensors, place)
    except Exception:
        return None
    if root is None or root.numel() == 0 or root.layout != torch.strided:
        return None
    random = np.random.default_rng(stable_seed("cotangent", seed, number))
    cotangent = torch.from_numpy(draw_normal(tuple(root.shape), random)).to(root.dtype)
    return _GradientCall(
        f"grad of {call.name}", call.function, (cotangent, *call.args), dict(call.kwargs), place=place
    )


def _differentiable_output(call: Call, tensors: Sequence[torch.Tensor], place: int) -> torch.Tensor | None:
    leaves = [t.detach().requires_grad_(index == place) for index, t in enumerate(tensors)]
    with torch.enable_grad():
        return next((output for output in results(call.run(leaves)) if output.requires_grad), None)


@dataclass(frozen=True)
class _GradientCall(Call):
    """The gradient to the tensor ``place`` of a call to ``function``; the first argument is the cotangent."""

    place: int = 0

    @cached_property
    def run(self) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        place = self.place
        forward = Call(self.name, self.function, self.args[1:], self.kwargs).run

        def gradient(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            cotangent, *inputs = tensors
            inputs[place] = leaf = inputs[place].detach().requires_grad_(True)
            with torch.enable_grad():
                root = next(output for output in results(forward(inputs)) if output.requires_grad)
                (found,) = torch.autograd.grad(root, leaf, cotangent)
            return found

        return gradient
