"""What a case runs: a module or function with its inputs, and what a training step does around it.

The reference and every torch subject run the same :class:`Program` by the same :func:`sbp.execute.execute`; they
differ only in what tensors stand in it. So a difference between their results is the subject's.
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

VALUE, GRADIENT, STATE, WRITE = "value", "gradient", "state", "write"
# Between an input's name and the number of the batch that it belongs to, in all batches but the first.
_IN_BATCH = " in batch "


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass; ``targets`` go to the loss."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What is done besides calling the function and going backward from random cotangents.

    Attributes:
        steps: optimizer steps of a training trial; batches repeat where there are not enough.
        accumulate: micro-batches for each step, whose losses are averaged.
        loss: called as ``loss(output, *targets)``.
        clip_norm: gradients are clipped to this total norm before each step.
        schedule: makes a learning-rate scheduler of the optimizer.
        autocast: the dtype of ``torch.autocast`` around forward pass and loss.
        save_after: the step after which everything is saved and loaded (on the subject's side).
    """

    steps: int = 3
    accumulate: int = 1
    loss: Callable[..., Any] | None = None
    clip_norm: float | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    autocast: str | None = None
    save_after: int | None = None


@dataclass(frozen=True)
class Program:
    """One module or function with its inputs.

    Attributes:
        function: what is called; for a module the module itself, so that its parameters and buffers are
            compared as well.
        args, kwargs: what it is called with; may nest tensors.
        names: the name of each positional argument. Left empty, they are taken from the signature.
        targets: what the recipe's loss gets besides the output.
        later: the batches after the first; their inputs are named like its inputs.
        recipe: what a run does besides.
        writes: the inputs that the function writes to, by name; they are compared as they are afterwards.
        keeps_placement: whether what it writes to must keep its placement, as an in-place operation must. False for
            ``out=``, which takes over the result's.
        random: whether results are drawn at random, so that their values cannot be compared.
        promise: what random results keep in any case; see sbp.oracle.promises.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    targets: tuple[Any, ...] = ()
    later: tuple[Batch, ...] = ()
    recipe: Recipe = Recipe()
    writes: tuple[str, ...] = ()
    keeps_placement: bool = True
    random: bool = False
    promise: str = ""

    @property
    def module(self) -> torch.nn.Module | None:
        return self.function if isinstance(self.function, torch.nn.Module) else None

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The inputs of one forward pass after the other."""
        return Batch(self.args, self.kwargs, self.targets), *self.later

    def inputs(self) -> dict[str, torch.Tensor]:
        """The input tensors of the first batch by name, in the order of the call, targets last."""
        return self.batch_inputs(self.batches[0])

    def batch_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The tensors of a batch by the names that those of the first one have."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self._named(batch):
            found.update(named_tensors(value, name))
        return found

    def _named(self, batch: Batch) -> Iterator[tuple[str, Any]]:
        yield from zip(self.argument_names(), batch.args, strict=True)
        yield from batch.kwargs.items()
        yield from zip(target_names(len(batch.targets)), batch.targets, strict=True)

    def argument_names(self) -> tuple[str, ...]:
        """The name of each positional argument."""
        return self.names or _argument_names(self.function, len(self.args))

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
        """The same program with every input tensor replaced by ``function(name, tensor)``. In batches after the
        first, a name is followed by the batch's number (see :func:`without_batch`)."""
        batches = [self._with_batch(batch, index, function) for index, batch in enumerate(self.batches)]
        first = batches[0]
        return replace(
            self,
            args=first.args,
            kwargs=first.kwargs,
            targets=first.targets,
            names=self.argument_names(),
            later=tuple(batches[1:]),
        )

    def _with_batch(self, batch: Batch, index: int, function: Callable[[str, torch.Tensor], Any]) -> Batch:
        suffix = f"{_IN_BATCH}{index + 1}" if index else ""

        def convert(name: str, value: Any) -> Any:
            return map_tensors(value, lambda inner, tensor: function(inner + suffix, tensor), name)

        names = self.argument_names(), target_names(len(batch.targets))
        return Batch(
            tuple(convert(name, value) for name, value in zip(names[0], batch.args, strict=True)),
            {name: convert(name, value) for name, value in batch.kwargs.items()},
            tuple(convert(name, value) for name, value in zip(names[1], batch.targets, strict=True)),
        )


def without_batch(name: str) -> str:
    """An input's name without the number of its batch: what its placement is called by."""
    return name.partition(_IN_BATCH)[0]


def target_names(count: int) -> tuple[str, ...]:
    """``target``, ``target_2`` and so on."""
    return tuple("target" if index == 0 else f"target_{index + 1}" for index in range(count))


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
