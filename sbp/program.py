"""What a case runs: a module or function with its inputs, and the one way in which it is run.

The reference and every torch subject execute the same :class:`Program` by the same :func:`execute`; they differ
only in what tensors stand in it. So a difference between their results is the subject's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sbp.trees import map_tensors, named_tensors

VALUE, GRADIENT, STATE = "value", "gradient", "state"


@dataclass(frozen=True)
class Program:
    """One module or function with its inputs.

    Attributes:
        function: what is called; for a module the module itself, so that its parameters and buffers are
            compared as well.
        args, kwargs: what it is called with; may nest tensors.
        names: the name of each positional argument. Left empty, they are taken from the signature.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def module(self) -> torch.nn.Module | None:
        return self.function if isinstance(self.function, torch.nn.Module) else None

    def inputs(self) -> dict[str, torch.Tensor]:
        """The input tensors by name, in the order of the call."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.arguments():
            found.update(named_tensors(value, name))
        return found

    def arguments(self) -> Iterator[tuple[str, Any]]:
        names = self.names or _argument_names(self.function, len(self.args))
        yield from zip(names, self.args, strict=True)
        yield from self.kwargs.items()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters by qualified name; a shared one appears once, under its first name."""
        return dict(self.module.named_parameters()) if self.module is not None else {}

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_buffers()) if self.module is not None else {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that can be placed: inputs, then parameters, then buffers. Names are unique, since an input
        that has the name of a parameter is called ``input:NAME``."""
        state = {**self.parameters(), **self.buffers()}
        inputs = {input_name(name, state): tensor for name, tensor in self.inputs().items()}
        return {**inputs, **state}

    def with_inputs(self, function: Callable[[str, torch.Tensor], Any]) -> Program:
        """The same program with every input tensor replaced by ``function(name, tensor)``."""
        names = self.names or _argument_names(self.function, len(self.args))
        return replace(
            self,
            args=tuple(
                map_tensors(value, function, name) for name, value in zip(names, self.args, strict=True)
            ),
            kwargs={name: map_tensors(value, function, name) for name, value in self.kwargs.items()},
            names=names,
        )


def input_name(name: str, state: Mapping[str, Any]) -> str:
    return f"input:{name}" if name in state else name


def _argument_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of the first ``count`` positional arguments, or ``input``, ``input_2`` ... without them."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional][:count]
    names += ["input" if index == 0 else f"input_{index + 1}" for index in range(len(names), count)]
    return tuple(names)


# Called with the name, the kind (VALUE, GRADIENT or STATE) and the tensor of each result as soon as it is known;
# None stands for a result that is not there, such as a gradient that was never made. The tensor may change
# afterwards, so whoever wants to keep it copies it.
Observe = Callable[[str, str, torch.Tensor | None], None]
# Gives the cotangent for the output of that name.
MakeCotangent = Callable[[str, torch.Tensor], torch.Tensor]
# Builds an optimizer from the named parameters.
MakeOptimizer = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


def execute(
    program: Program,
    make_cotangent: MakeCotangent,
    observe: Observe,
    make_optimizer: MakeOptimizer | None = None,
    steps: int = 3,
) -> None:
    """Run ``program`` forward and backward, and for ``steps`` optimizer steps where an optimizer is given.

    Args:
        program: what to run; its tensors are used as they are (inputs that require a gradient are leaves).
        make_cotangent: called with ``output`` or ``output[1]`` and that output; its result is what the
            backward pass starts from.
        observe: told each result as soon as it is known, so that nothing is lost where a later part raises.
        make_optimizer: for a training trial.
        steps: how many steps of training.
    """
    state = {**program.parameters(), **program.buffers()}
    optimizer = make_optimizer(list(program.parameters().items())) if make_optimizer is not None else None
    for step in range(1, (steps if optimizer is not None else 1) + 1):
        during = f" of step {step}" if optimizer is not None else ""
        after = f" after step {step}" if optimizer is not None else ""
        outputs = named_tensors(program.function(*program.args, **program.kwargs), "output")
        for name, tensor in outputs.items():
            observe(name + during, VALUE, tensor)
        # The forward pass writes to buffers, so they are looked at even where the backward pass raises.
        for name, buffer in program.buffers().items():
            observe(name + after, STATE, buffer)
        roots = [(name, tensor) for name, tensor in outputs.items() if tensor.requires_grad]
        if roots:
            cotangents = [make_cotangent(name, tensor) for name, tensor in roots]
            torch.autograd.backward([tensor for _, tensor in roots], cotangents)
        leaves = [(input_name(name, state), t) for name, t in program.inputs().items() if t.is_leaf]
        for name, tensor in [*leaves, *program.parameters().items()]:
            if tensor.requires_grad:
                observe(f"{name}.grad{during}", GRADIENT, tensor.grad)
        if optimizer is not None:
            optimizer.step()
            for name, parameter in program.parameters().items():
                observe(name + after, STATE, parameter)
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        observe(f"{key} of {name}{after}", STATE, value)
            optimizer.zero_grad(set_to_none=True)
            for tensor in program.inputs().values():
                tensor.grad = None


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of the values. bfloat16 and the 8-bit floats, which numpy lacks, come as float32."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float64, torch.float32, torch.float16):
        tensor = tensor.float()
    return np.array(tensor.resolve_conj().resolve_neg().cpu().numpy())


def replace_tensors(program: Program, function: Callable[[str, torch.Tensor], torch.Tensor]) -> Program:
    """A copy of ``program`` with each input, parameter and buffer replaced by ``function(name, tensor)``.

    Names are those of :meth:`Program.tensors`. A tensor that is shared (tied weights) is replaced once and
    stays shared; whatever else the module holds is copied.
    """
    state = {**program.parameters(), **program.buffers()}
    replaced = program.with_inputs(lambda name, tensor: function(input_name(name, state), tensor))
    if program.module is None:
        return replaced
    # deepcopy looks up what it has copied already by id: told of the tensors beforehand, it puts the new ones
    # wherever the old ones stand, in lists of weights (RNNs) and under second names as well.
    memo: dict[int, Any] = {id(tensor): function(name, tensor) for name, tensor in state.items()}
    return replace(replaced, function=copy.deepcopy(program.module, memo))
