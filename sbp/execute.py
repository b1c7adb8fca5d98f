"""The one way in which a program is run, on one device as on many: forward, backward, and optimizer steps.

What is parallel code besides the module itself (a loss over a split vocabulary, clipping over all ranks) stands in
a :class:`Side`; the reference's side has none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sbp.program import GRADIENT, STATE, VALUE, WRITE, Batch, Program, input_name
from sbp.trees import named_tensors


class Quantity(NamedTuple):
    """One named thing that is compared.

    Attributes:
        of: the tensor that it is about: an output, input, parameter or buffer, by name.
        kind: VALUE, GRADIENT or STATE.
        words: its name, with ``{}`` for ``of``: ``{}.grad of step 2``.
    """

    of: str
    kind: str
    words: str = "{}"

    @property
    def name(self) -> str:
        """Such as ``output``, ``fc.weight.grad of step 2``, ``exp_avg of fc.weight after step 1``."""
        return self.words.replace("{}", self.of)

    @property
    def is_gradient_of(self) -> bool:
        """Whether it is the gradient of ``of``, so that it lies as gradients do."""
        return self.words.startswith("{}.grad")


# Told of each result as soon as it is known; None stands for a result that is not there, such as a gradient that
# was never made. The tensor may change afterwards, so whoever wants to keep it copies it.
Observe = Callable[[Quantity, torch.Tensor | None], None]
# Gives the cotangent for the output of that name.
MakeCotangent = Callable[[str, torch.Tensor], torch.Tensor]
Named = list[tuple[str, torch.nn.Parameter]]
# Builds an optimizer from the named parameters.
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]
# Makes the context in which the module and the loss are called, given this pass's inputs by name and the named
# parameters and buffers; for whoever records what happens inside (see sbp.culprit). None for nobody.
AROUND_CALLS: ContextVar[Callable[..., AbstractContextManager[Any]] | None] = ContextVar(
    "around calls", default=None
)


@dataclass
class Side:
    """One side of a comparison: what is called and what a step does with it. May change during a run, when a saved
    state is loaded into a new module.

    Attributes:
        call: the module or function.
        parameters, buffers: by name, as they are at that moment.
        loss, clip, schedule, make_optimizer, synchronise, context: see :class:`sbp.cases.Parallel`.
        input_scales: how much larger than the reference's the gradient of that input is on this side, which
            averages gradients over ranks that count their loss over their own part.
        reload: saves everything, loads it into something new, changes this side accordingly and returns the program
            with its inputs as they are then, the new optimizer and scheduler.
    """

    call: Callable[..., Any]
    parameters: Callable[[], Named]
    buffers: Callable[[], Sequence[tuple[str, torch.Tensor | None]]]
    make_optimizer: MakeOptimizer | None = None
    loss: Callable[..., Any] | None = None
    clip: Callable[[list[torch.nn.Parameter]], Any] | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    synchronise: Callable[[], None] | None = None
    context: Callable[..., AbstractContextManager[Any]] | None = None
    input_scales: dict[str, float] = field(default_factory=dict)
    reload: Callable[[torch.optim.Optimizer, Any], tuple[Program, torch.optim.Optimizer, Any]] | None = None


def side_of(program: Program, make_optimizer: MakeOptimizer | None = None) -> Side:
    """The side that is nothing but the program itself."""
    recipe = program.recipe
    clip = None
    if recipe.clip_norm is not None:
        limit = recipe.clip_norm

        def clip(parameters: list[torch.nn.Parameter]) -> Any:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)

    return Side(
        call=program.function,
        parameters=lambda: list(program.parameters().items()),
        buffers=lambda: list(program.buffers().items()),
        make_optimizer=make_optimizer,
        loss=recipe.loss,
        clip=clip,
        schedule=recipe.schedule,
    )


def execute(
    program: Program,
    make_cotangent: MakeCotangent,
    observe: Observe,
    make_optimizer: MakeOptimizer | None = None,
    side: Side | None = None,
) -> None:
    """Run ``program`` forward and backward, and through the optimizer steps of its recipe where an optimizer is given.

    Args:
        program: its tensors are used as they are (inputs that require a gradient are leaves).
        make_cotangent: called with ``output`` or ``output[1]`` and that output; its result is what the backward
            pass starts from. Not used where the recipe has a loss.
        observe: told each result as soon as it is known, so that nothing is lost where a later part raises.
        make_optimizer: for a training trial.
        side: what is called and how its steps are made, where it is more than the program.
    """
    if side is None:
        side = side_of(program, make_optimizer)
    run = _Run(program, side, make_cotangent, observe)
    if side.make_optimizer is None:
        run.forward_and_backward(1)
        run.observe_gradients("")
        return
    optimizer = side.make_optimizer(side.parameters())
    scheduler = side.schedule(optimizer) if side.schedule is not None else None
    for step in range(1, program.recipe.steps + 1):
        run.train(step, optimizer, scheduler)
        if step == program.recipe.save_after:
            if side.reload is not None:
                run.program, optimizer, scheduler = side.reload(optimizer, scheduler)
            run.observe_state(f"after loading (step {step})", optimizer)


class _Run:
    def __init__(self, program: Program, side: Side, make_cotangent: MakeCotangent, observe: Observe) -> None:
        self.program = program
        self.recipe = program.recipe
        self.side = side
        self.make_cotangent = make_cotangent
        self.observe = observe
        self.training = side.make_optimizer is not None

    def train(self, step: int, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """One optimizer step."""
        evaluated = False

        def evaluate() -> Any:
            # An optimizer that searches a line evaluates several times; the first time is the one that is compared.
            nonlocal evaluated
            optimizer.zero_grad(set_to_none=True)
            before, self.observe = self.observe, _ignore if evaluated else self.observe
            try:
                loss = self.forward_and_backward(step)
                self.observe_gradients(f" of step {step}")
                self._clip(f" of step {step}")
            finally:
                self.observe = before
            evaluated = True
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        self.observe_state(f"after step {step}", optimizer)
        if scheduler is not None:
            scheduler.step()
            for index, group in enumerate(optimizer.param_groups):
                rate = torch.as_tensor(group["lr"], dtype=torch.float64)
                self.observe(Quantity(f"learning rate {index}", STATE, f"{{}} after step {step}"), rate)
        optimizer.zero_grad(set_to_none=True)
        for batch in self._batches(step):
            for tensor in self.program.batch_inputs(batch).values():
                tensor.grad = None

    def forward_and_backward(self, step: int) -> Any:
        """All micro-batches of a step; returns the sum of their losses, 0 where there is no loss."""
        total: Any = 0.0
        batches = self._batches(step)
        for number, batch in enumerate(batches, 1):
            during = f" of step {step}" if self.training else ""
            during += f", batch {number}" if len(batches) > 1 else ""
            last = number == len(batches)
            with self.side.context(*batch.args, **batch.kwargs) if self.side.context else nullcontext():
                roots = self._forward(batch, during, f" after step {step}" if self.training else "", last)
                share = 1 / len(batches)
                if self.recipe.loss is not None:
                    [loss] = roots.values()
                    scaled = loss * share if share != 1 else loss
                    if scaled.requires_grad:
                        scaled.backward()
                    total = total + scaled.detach()
                elif roots:
                    cotangents = [self.make_cotangent(name, output) for name, output in roots.items()]
                    if share != 1:
                        cotangents = [cotangent * share for cotangent in cotangents]
                    torch.autograd.backward(list(roots.values()), cotangents)
            self._observe_input_gradients(batch, during)
        if self.side.synchronise is not None:
            self.side.synchronise()
        return total

    def _batches(self, step: int) -> list[Batch]:
        every, count = self.program.batches, self.recipe.accumulate if self.training else 1
        first = (step - 1) * count
        return [every[(first + index) % len(every)] for index in range(count)]

    def _forward(self, batch: Batch, during: str, after: str, last: bool) -> dict[str, torch.Tensor]:
        """The forward pass and the loss; what to go backward from."""
        loss = None
        with self._autocast(batch):
            with self._recorded(batch):
                result = self.side.call(*batch.args, **batch.kwargs)
            outputs = named_tensors(result, "output")
            for name, tensor in outputs.items():
                self.observe(Quantity(name, VALUE, "{}" + during), tensor)
            if self.recipe.loss is not None:
                assert self.side.loss is not None
                with self._recorded(batch):
                    loss = self.side.loss(result, *batch.targets)
                self.observe(Quantity("loss", VALUE, "{}" + during), loss)
            inputs = self.program.batch_inputs(batch)
            for name in self.program.writes:
                self.observe(Quantity(name, WRITE, "{} afterwards" + during), inputs[name])
        # The forward pass writes to buffers, so they are looked at even where the backward pass raises.
        if last:
            for name, buffer in self.side.buffers():
                self.observe(Quantity(name, STATE, "{}" + after), buffer)
        if loss is not None:
            return {"loss": loss}
        return {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}

    def _recorded(self, batch: Batch) -> AbstractContextManager[Any]:
        around = AROUND_CALLS.get()
        if around is None:
            return nullcontext()
        return around(self.program.batch_inputs(batch), [*self.side.parameters(), *self.side.buffers()])

    def _autocast(self, batch: Batch) -> AbstractContextManager[Any]:
        if self.recipe.autocast is None:
            return nullcontext()
        devices = [tensor.device.type for tensor in self.program.batch_inputs(batch).values()]
        return torch.autocast(devices[0] if devices else "cpu", getattr(torch, self.recipe.autocast))

    def _observe_input_gradients(self, batch: Batch, during: str) -> None:
        state = {**self.program.parameters(), **self.program.buffers()}
        for name, tensor in self.program.batch_inputs(batch).items():
            if tensor.is_leaf and tensor.requires_grad:
                gradient = tensor.grad
                scale = self.side.input_scales.get(name, 1.0)
                if gradient is not None and scale != 1.0:
                    gradient = gradient / scale
                self.observe(Quantity(input_name(name, state), GRADIENT, "{}.grad" + during), gradient)

    def observe_gradients(self, during: str) -> None:
        for name, parameter in self.side.parameters():
            if parameter.requires_grad:
                self.observe(Quantity(name, GRADIENT, "{}.grad" + during), parameter.grad)

    def _clip(self, during: str) -> None:
        if self.side.clip is None:
            return
        parameters = [parameter for _, parameter in self.side.parameters() if parameter.requires_grad]
        norm = self.side.clip(parameters)
        if norm is not None:
            norm = norm if isinstance(norm, torch.Tensor) else torch.tensor(float(norm), dtype=torch.float64)
            self.observe(Quantity("total norm", GRADIENT, "{}" + during), norm)

    def observe_state(self, after: str, optimizer: torch.optim.Optimizer) -> None:
        """Every parameter and what the optimizer keeps for it."""
        for name, parameter in self.side.parameters():
            self.observe(Quantity(name, STATE, f"{{}} {after}"), parameter)
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    self.observe(Quantity(name, STATE, f"{key} of {{}} {after}"), value)


def _ignore(quantity: Quantity, tensor: torch.Tensor | None) -> None:
    """Observes nothing."""
