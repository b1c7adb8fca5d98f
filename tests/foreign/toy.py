"""A toy framework of global tensors, in numpy, as a subject: pieces, their SBP, and one way to move them.

It knows one-dimensional meshes and no gradients, and says so. ``Careless`` is the same with one fault.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from sbp.placement import Mesh, combine, parse_sbp, show, split
from sbp.subjects.foreign import Missing, Observe, Task, World, run_recipe
from sbp.verdict.compare import Observed


class Tensor:
    """A global tensor, one rank's view of it."""

    moves = True  # whether an operand is moved to where the target lies before it is used

    def __init__(self, local: Any, sbp: str, shape: tuple[int, ...], mesh: Mesh | None) -> None:
        self.local, self.sbp, self.shape, self.mesh = local, sbp, shape, mesh

    def to(self, sbp: str) -> Tensor:
        if self.mesh is None:
            return Tensor(self.local.copy(), sbp, self.shape, None)
        pieces: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(pieces, self.local)
        full = combine(pieces, parse_sbp(self.sbp, self.mesh), self.mesh, self.shape)
        target = parse_sbp(sbp, self.mesh)
        mine = split(full, target, self.mesh, np.random.default_rng(0))[dist.get_rank()]
        return Tensor(np.array(mine), show(target), self.shape, self.mesh)

    def add_(self, other: Any) -> Tensor:
        if not isinstance(other, Tensor) or other.shape != self.shape:
            raise NotImplementedError("the toy adds only tensors of the same shape")
        self.local += (other.to(self.sbp) if self.moves else other).local
        return self


class ToySubject:
    """The subject: what docs/add-a-subject.md asks for."""

    balanced = False
    tensor: type[Tensor] = Tensor

    def __init__(self, world: World) -> None:
        address, limit = f"tcp://{world.host}:{world.port}", timedelta(seconds=world.timeout)
        dist.init_process_group("gloo", address, limit, world_size=world.size, rank=world.rank)

    def barrier(self) -> None:
        dist.barrier()

    def explain(self, error: BaseException) -> tuple[str, bool]:
        return str(error), isinstance(error, NotImplementedError)

    def run(self, task: Task, observe: Observe) -> None:
        if len(task.mesh.shape) > 1:
            raise NotImplementedError("the toy has one mesh axis")
        if any(piece.requires_grad for piece in task.inputs.values()):
            raise NotImplementedError("the toy has no gradients")
        mesh = None if task.options.get("mode") == "local" else task.mesh
        tensors = {
            f"in {name}": self.tensor(piece.local, piece.sbp, piece.shape, mesh)
            for name, piece in task.inputs.items()
        }
        outputs = run_recipe(task.recipe, tensors, lambda do, name: self.find(name), lambda item: item)
        for name, tensor in outputs.items():
            observe(self.observed(name, "value", tensor))
        for name in task.writes:
            observe(self.observed(f"{name} afterwards", "write", tensors[f"in {name}"]))

    def find(self, name: str) -> Any:
        if name != "redistribute":
            raise Missing(f"the toy has no {name}")
        return lambda tensor, to: tensor.to(to)

    def observed(self, name: str, kind: str, tensor: Tensor) -> Observed:
        claimed = None if tensor.mesh is None else tensor.sbp
        return Observed(name, kind, claimed, tensor.shape, str(tensor.local.dtype), np.array(tensor.local))


class CarelessTensor(Tensor):
    moves = False


class CarelessSubject(ToySubject):
    """The toy without the move before ``add_``: replicas and pieces go wrong as soon as the operand lies otherwise."""

    tensor = CarelessTensor


def offers() -> dict[str, Any]:
    nothing: list[str] = []
    names = {"modules": nothing, "functions": ["redistribute"], "methods": ["add_"]}
    return {"name": "the toy", "versions": {}, "modes": nothing, **names}
