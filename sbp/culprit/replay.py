"""One rank's part of a replay: the trial is run again on both sides with every step recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from sbp.culprit.record import Recorder
from sbp.execute import AROUND_CALLS, Quantity
from sbp.placement import Mesh, parse_sbp, split
from sbp.program import to_numpy
from sbp.subjects.dtensor import from_torch, observe_tensor, to_torch
from sbp.subjects.parallel import Grid, observe_claimed
from sbp.trees import map_tensors, named_tensors
from sbp.trial import stable_seed
from sbp.verdict.compare import Observed

# What one side may keep of a replay, in bytes; what comes after it is not recorded.
_MOST_BYTES = 1 << 30
# Before the names of what the step alone gives.
ALONE = "alone"


@dataclass
class Replay:
    """What was recorded on this rank of one trial.

    Attributes:
        reference: the recorder of the run on one device, and ``expected`` its values by name. Gradients are
            called ``NAME.grad``.
        observed: what this rank holds of the results of the same names; subject: its recorder.
    """

    reference: Recorder
    expected: dict[str, np.ndarray[Any, Any]]
    observed: dict[str, Observed] = field(default_factory=dict)
    subject: Recorder | None = None

    def answer(self, rank: int) -> dict[str, Any]:
        """What the leading rank is told: all that there is, without the values."""
        seen = {
            name: {"claimed": one.claimed, "mesh": one.mesh, "problem": one.problem, "shape": one.shape}
            for name, one in self.observed.items()
        }
        answer: dict[str, Any] = {"observed": seen}
        if rank == 0:
            answer["events"] = [event.to_dict() for event in self.reference.events]
            answer["gradients"] = self.reference.gradients
            # Code that was written for each rank stands elsewhere than the reference's.
            own = self.subject.events if self.subject is not None else []
            answer["own"] = {event.key: {"line": event.line, "kind": event.kind} for event in own}
        return answer

    def values(self, names: list[str], rank: int) -> dict[str, Any]:
        """This rank's pieces of the named results; on the first rank the whole ones as well."""
        pieces = {name: self.observed[name].local for name in names if name in self.observed}
        answer: dict[str, Any] = {"pieces": pieces}
        if rank == 0:
            answer["expected"] = {name: self.expected[name] for name in names if name in self.expected}
        return answer


def replay(
    run_reference: Callable[[], Any], run_subject: Callable[[], Any], grid: Callable[[], Grid | None]
) -> Replay:
    """Run both sides with everything recorded. What the subject raises ends its part of it.

    Args:
        run_reference, run_subject: run the trial on one device and on this rank of many.
        grid: the case's mesh, where the case says itself how it becomes parallel; known once it runs.
    """
    expected: dict[str, np.ndarray[Any, Any]] = {}
    room = [_MOST_BYTES, _MOST_BYTES]

    def keep(name: str, is_gradient: bool, tensor: torch.Tensor) -> None:
        room[0] -= tensor.numel() * tensor.element_size()
        if room[0] > 0:
            expected[f"{name}.grad" if is_gradient else name] = to_numpy(tensor)

    reference = Recorder(keep)
    _recorded(reference, run_reference)
    result = Replay(reference, expected)

    def look(name: str, is_gradient: bool, tensor: torch.Tensor) -> None:
        full = f"{name}.grad" if is_gradient else name
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        room[1] -= local.numel() * local.element_size()
        if full not in expected or room[1] <= 0:
            return
        kind = "gradient" if is_gradient else "value"
        lies = grid()
        if lies is None:
            result.observed[full] = observe_tensor(full, kind, tensor)
        else:
            result.observed[full] = observe_claimed(Quantity(full, kind), tensor, None, lies)

    result.subject = Recorder(look)
    try:
        _recorded(result.subject, run_subject)
    except Exception:
        # The trial's own verdict has it; what was recorded before is what counts here.
        return result
    return result


def run_alone(
    done: Replay,
    key: str,
    run_reference: Callable[[], Any],
    run_subject: Callable[[], Any],
    rank: int,
    mesh: Mesh,
) -> tuple[dict[str, Observed], dict[str, np.ndarray[Any, Any]]] | None:
    """The step ``key`` alone, forward and backward, on the reference's inputs placed as the subject's are.

    Returns: what this rank holds of its results and of the gradients of its arguments, and what one device has; None
    where the step cannot be run so (it has no DTensor among its arguments, or was not reached).
    """
    inputs: list[torch.Tensor] = []
    expected: dict[str, np.ndarray[Any, Any]] = {}
    observed: dict[str, Observed] = {}
    reached = [False]

    def on_one_device(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves, call_args, call_kwargs = _as_leaves(
            args, kwargs, lambda index, tensor: tensor.detach().clone()
        )
        inputs.extend(leaf.detach().clone() for leaf in leaves)
        for name, result in _forward_and_backward(func, call_args, call_kwargs, leaves, key, done, None):
            expected[name] = to_numpy(result)

    def on_many(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = list(named_tensors((args, dict(kwargs)), "").values())
        device_mesh = next((each.device_mesh for each in tensors if isinstance(each, DTensor)), None)
        if device_mesh is None or len(tensors) != len(inputs) or tuple(device_mesh.shape) != mesh.shape:
            return

        def place(index: int, tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, DTensor):
                return tensor.detach().clone()
            return _placed(inputs[index], tensor.placements, tensor, rank, mesh, f"{key} {index}")

        leaves, call_args, call_kwargs = _as_leaves(args, kwargs, place)
        reached[0] = True
        for name, result in _forward_and_backward(
            func, call_args, call_kwargs, leaves, key, done, (rank, mesh)
        ):
            observed[name] = observe_tensor(name, "value", result)

    _recorded(Recorder(_ignore, key, on_one_device), run_reference)
    try:
        _recorded(Recorder(_ignore, key, on_many), run_subject)
    except Exception:
        if not observed:
            return None
    return (observed, expected) if reached[0] else None


def _as_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], make: Callable[[int, torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor replaced by a leaf of its own, and the leaves."""
    leaves: list[torch.Tensor] = []

    def convert(_: str, tensor: torch.Tensor) -> torch.Tensor:
        leaf = make(len(leaves), tensor).detach()
        leaves.append(leaf.requires_grad_(tensor.requires_grad))
        return leaf

    new_args, new_kwargs = map_tensors((args, dict(kwargs)), convert, "")
    return leaves, new_args, new_kwargs


def _forward_and_backward(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[torch.Tensor],
    key: str,
    done: Replay,
    where: Any,
) -> list[tuple[str, torch.Tensor]]:
    """The results of ``func``, then the gradients of its arguments."""
    in_place = any(leaf.requires_grad for leaf in leaves) and getattr(func, "__name__", "").endswith("_")
    if in_place and not getattr(func, "__name__", "").endswith("__"):
        # A leaf that requires a gradient must not be written to.
        args, kwargs = map_tensors(
            (args, kwargs), lambda _, tensor: tensor * 1 if tensor.requires_grad else tensor, ""
        )
    found: list[tuple[str, torch.Tensor]] = []
    with torch.enable_grad():
        results = named_tensors(func(*args, **kwargs), "")
        found += [(f"{ALONE}{name}", result.detach().clone()) for name, result in results.items()]
        roots, cotangents = [], []
        for name, result in results.items():
            full = done.expected.get(f"{key}{name}.grad")
            if full is None or not result.requires_grad or tuple(full.shape) != tuple(result.shape):
                continue
            cotangent: torch.Tensor = torch.from_numpy(np.array(full)).to(result.dtype).to(result.device)
            if where is not None and isinstance(result, DTensor):
                seen = done.observed.get(f"{key}{name}.grad")
                cotangent = _cotangent(cotangent, seen, result, where, f"{key}{name}.grad")
            roots.append(result)
            cotangents.append(cotangent)
        if roots:
            torch.autograd.backward(roots, cotangents)
            for index, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    found.append((f"{ALONE} {index}.grad", leaf.grad))
    return found


def _cotangent(
    full: torch.Tensor, seen: Observed | None, result: DTensor, where: Any, name: str
) -> torch.Tensor:
    """The gradient of a result as the reference has it, placed as the subject's was."""
    rank, mesh = where
    claimed = seen.claimed if seen is not None and seen.claimed is not None else "B"
    placements = tuple(to_torch(parse_sbp(claimed, mesh)))
    return _placed(full, placements, result, rank, mesh, name)


def _placed(full: torch.Tensor, placements: Any, like: DTensor, rank: int, mesh: Mesh, name: str) -> DTensor:
    """``full`` as a DTensor with these placements."""
    sbp = parse_sbp(from_torch(tuple(placements)), mesh)
    random = np.random.default_rng(stable_seed("alone", name))
    piece = split(to_numpy(full), sbp, mesh, random)[rank]
    return DTensor.from_local(
        torch.from_numpy(np.array(piece)).to(full.dtype).to(full.device),
        like.device_mesh,
        list(placements),
        run_check=False,
        shape=full.shape,
        stride=full.contiguous().stride(),
    )


def _recorded(recorder: Recorder, run: Callable[[], Any]) -> None:
    token = AROUND_CALLS.set(recorder.around)
    try:
        run()
    finally:
        AROUND_CALLS.reset(token)


def _ignore(name: str, is_gradient: bool, tensor: torch.Tensor) -> None:
    """Keeps nothing."""
