"""What DTensor's sharding rules claim for a call of an ATen operator; asked without ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sbp.oracle.calls import Call
from sbp.placement import B, P, Placement, S


class Refused(Exception):
    """The subject does not run the call on tensors that lie so; says why."""


class Unknown(Exception):
    """The subject's claim has no counterpart here; says why."""


@dataclass(frozen=True)
class Claim:
    """What the subject does with inputs that lie in some way.

    Attributes:
        inputs: how they lie when every rank runs the local operator: other than before where data is moved first.
        outputs: how the results are said to lie.
        local: the call with the other arguments that the first rank gives the local operator; None where they are
            those of the whole call.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: Call | None


@cache
def _mesh(parts: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    # No process group: rules ask a mesh for its sizes and for the own place in it only.
    return DeviceMesh("cpu", list(range(parts)), _init_backend=False, _rank=0)


def _dispatcher() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def why_not(call: Call) -> str:
    """Why the rules cannot be asked about a call; empty where they can."""
    if call.function in _dispatcher()._custom_op_handlers:
        return "DTensor runs it by a handler of its own, beside its rules"
    return ""


def ask(call: Call, placements: Sequence[Placement], parts: int) -> Claim:
    """What DTensor would do with the call's tensors lying so on a mesh of one axis. Raises Refused and Unknown."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema

    mesh = _mesh(parts)
    specs: list[Any] = [
        DTensorSpec(mesh, (_to_dtensor(p),), TensorMeta(t.shape, t.stride(), t.dtype))
        for t, p in zip(call.tensors, placements, strict=True)
    ]
    described = call.with_tensors(specs)
    schema = OpSchema(call.function, described.args, dict(described.kwargs))
    try:
        sharding = _dispatcher().sharding_propagator.propagate_op_sharding_non_cached(schema)
    except Exception as error:
        text = str(error).strip() or "no message"
        raise Refused(f"{type(error).__name__}: {text.splitlines()[0]}"[:200]) from error
    used: Any = schema
    if sharding.needs_redistribute and sharding.redistribute_schema is not None:
        used = sharding.redistribute_schema
    moved = list(_specs((used.args_schema, used.kwargs_schema or schema.kwargs_schema)))
    if len(moved) != len(specs):
        raise Unknown("the redistributed arguments are not those of the call")
    inputs = tuple(_from_dtensor(spec) for spec in moved)
    outputs = tuple(_from_dtensor(spec) for spec in _specs(sharding.output_spec))
    local = None
    if sharding.use_val_from_redistribute_schema:
        local = Call(
            call.name,
            call.function,
            _fill(used.args_schema, iter(call.tensors)),
            dict(call.kwargs),
            call.written,
        )
    return Claim(inputs, outputs, local)


def _fill(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if isinstance(tree, DTensorSpec):
        return next(tensors)
    if isinstance(tree, (tuple, list)) and not isinstance(tree, torch.Size):
        return type(tree)([_fill(item, tensors) for item in tree])
    return tree


def _specs(tree: Any) -> Iterator[Any]:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if isinstance(tree, DTensorSpec):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _specs(item)
    elif isinstance(tree, dict):
        yield from _specs(list(tree.values()))


def _to_dtensor(placement: Placement) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if placement.is_split:
        return Shard(placement.dim)
    return Partial(placement.reduction) if placement.is_partial else Replicate()


def _from_dtensor(spec: Any) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    (placement,) = spec.placements
    if type(placement) is Shard:
        return S(placement.dim)
    if type(placement) is Replicate:
        return B
    if type(placement) is Partial:
        return P(placement.reduce_op)
    raise Unknown(f"{placement} has no counterpart among S, B and P")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorded = Call(str(func), func, tuple(args), dict(kwargs or {}))
        strided = all(tensor.layout == torch.strided for tensor in recorded.tensors)
        if recorded.tensors and strided and func.namespace == "aten" and not _is_out(func):
            copies = recorded.with_tensors([tensor.detach().clone() for tensor in recorded.tensors])
            self.calls.append(Call(copies.name, func, copies.args, copies.kwargs, _written(func, recorded)))
        return func(*args, **(kwargs or {}))


def _is_out(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def _written(func: Any, call: Call) -> tuple[int, ...]:
    places: list[int] = []
    count = 0
    for number, argument in enumerate(func._schema.arguments):
        if number < len(call.args):
            value = call.args[number]
        elif argument.name in call.kwargs:
            value = call.kwargs[argument.name]
        else:
            continue
        held = len(Call("", func, (value,)).tensors)
        if argument.alias_info is not None and argument.alias_info.is_write:
            places += range(count, count + held)
        count += held
    return tuple(places)


def dispatched(call: Call) -> list[Call]:
    """The ATen operators that a call comes to, in order, each with the arguments that it got."""
    recorder = _Recorder()
    tensors = [tensor.detach().clone() for tensor in call.tensors]
    with torch.no_grad(), recorder:
        replace(call, written=()).run(tensors)  # the copies are its own
    return recorder.calls
