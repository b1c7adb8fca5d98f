"""Modules made parallel by a plan (tensor and sequence parallel, FSDP2, DDP, ...) as a subject.

The plan works on a copy of the reference's module. Afterwards parameters, buffers and gradients are found again by
name, whatever wraps them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.folder import FOLDER
from sbp.cases import Case, Parallel
from sbp.execute import MakeOptimizer, Named, Quantity, Side
from sbp.placement import Mesh, parse_mesh
from sbp.program import GRADIENT, STATE, VALUE, Program, replace_tensors
from sbp.subjects.parallel import (
    Grid,
    ParallelSubject,
    as_parallel,
    call_of,
    clean_module_names,
    copy_reference,
    local_inputs,
    loss_sbp,
    observe_claimed,
)
from sbp.verdict.compare import Observed

_LONGEST_PATH = 4096  # of Linux


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of the parallel module.

    Attributes:
        name: the reference's name for it; followed by its own where a second tensor stands for the same one.
        like: the reference's name.
    """

    name: str
    like: str
    tensor: torch.Tensor


class PlannedSubject(ParallelSubject):
    """See the module's docstring."""

    def set_up(
        self, program: Program, case_id: str, mesh: Mesh, make_optimizer: MakeOptimizer | None
    ) -> tuple[Program, Side]:
        self.grid = self.grids.grid(
            self.case, mesh
        )  # made first, so that all ranks make it at the same point
        self._aliases = aliases(program)
        self._like: dict[str, str] = {}
        self._loss_sbp = loss_sbp(self.case, self.grid, program.inputs())
        self._settings = self.case
        parallel, call = self._make_parallel(program, self.case, self.grid)
        local, scales = local_inputs(
            program, case_id, self.case, self.grid, self.pieces, self.case.dtensor_inputs
        )
        side = self.side(local, parallel, call, make_optimizer, scales)
        side.parameters = self._parameters
        side.buffers = lambda: [(held.name, held.tensor) for held in self._held(parameters=False)]
        train = self.case.train
        if train is not None and train.save_after is not None:
            side.reload = lambda optimizer, scheduler: self._reload(
                program, case_id, mesh, side, make_optimizer, optimizer, scheduler
            )
        return local, side

    def _make_parallel(self, program: Program, case: Case, grid: Grid) -> tuple[Parallel, Callable[..., Any]]:
        module = copy_reference(program)
        assert case.plan is not None
        with without_ddp_log():
            made = case.plan(module, grid.device_mesh)
        parallel = as_parallel(made, module, f"the plan of case {case.name}")
        self.parallel = parallel
        self._names: dict[str, str] = {}
        if isinstance(parallel.module, torch.nn.Module):
            self._names = clean_module_names(parallel.module)
        return parallel, call_of(parallel, case, self._names)

    def _held(self, parameters: bool) -> list[Held]:
        """The parameters (or buffers) of the parallel module as they are now."""
        module = self.parallel.module if self.parallel is not None else None
        if not isinstance(module, torch.nn.Module):
            return []
        held: dict[int, Held] = {}
        taken: set[str] = set()
        for path, owner in module.named_modules(remove_duplicate=False):
            own = owner._parameters if parameters else owner._buffers
            for key, tensor in own.items():
                if tensor is None or id(tensor) in held:
                    continue
                prefix = self._names[path]
                clean = f"{prefix}.{key}" if prefix else key
                like = self._aliases.get(clean, clean)
                # Two tensors where the reference has one: tied weights that were untied.
                name = like if like not in taken else f"{like} (as {clean})"
                taken.add(name)
                self._like[name] = like
                held[id(tensor)] = Held(name, like, tensor)
        return list(held.values())

    def _parameters(self) -> Named:
        return [(held.name, held.tensor) for held in self._held(parameters=True)]

    def observer(self, observed: dict[str, Observed]) -> Callable[[Quantity, torch.Tensor | None], None]:
        def observe(quantity: Quantity, tensor: torch.Tensor | None) -> None:
            assert self.grid is not None
            case, grid = self._settings, self.grid
            like = self._like.get(quantity.of)
            of = like or quantity.of
            if quantity.of == "loss" and quantity.kind == VALUE:
                declared = self._loss_sbp
            elif quantity.kind == GRADIENT:
                declared = grid.gradient(case, of, nested=like is None)
            elif quantity.kind == STATE and tensor is not None and tensor.ndim == 0:
                declared = None  # an optimizer's step count
            else:
                declared = grid.resolve(case, of, nested=like is None)
            seen = observe_claimed(quantity, tensor, declared, grid)
            if like is not None and like != quantity.of:
                seen = replace(seen, like=quantity.words.replace("{}", like))
            self.note(observed, seen)

        return observe

    # ------------------------------------------------------------------------------------- save and load

    def _reload(
        self,
        program: Program,
        case_id: str,
        mesh: Mesh,
        side: Side,
        make_optimizer: MakeOptimizer | None,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
    ) -> tuple[Program, torch.optim.Optimizer, Any]:
        """Save, then load into a new module under the plan and mesh that the case names for it."""
        train, before = self.case.train, self.parallel
        assert train is not None and before is not None
        into = train.load_into or self.case
        new_mesh = parse_mesh(train.load_on) if train.load_on is not None else mesh
        grid = self.grids.grid(into, new_mesh)
        folder = shared_folder(self.rank)
        try:
            (before.save or save_checkpoint)(before.module, optimizer, folder)
            parallel, call = self._make_parallel(other_values(program), into, grid)
            self.grid, self._settings = grid, into
            self._loss_sbp = loss_sbp(into, grid, program.inputs())
            local, scales = local_inputs(program, case_id, into, grid, self.pieces, into.dtensor_inputs)
            new = self.side(local, parallel, call, make_optimizer, scales)
            for name in ("call", "loss", "clip", "synchronise", "context", "input_scales"):
                setattr(side, name, getattr(new, name))
            assert new.make_optimizer is not None
            new_optimizer = new.make_optimizer(self._parameters())
            new_scheduler = new.schedule(new_optimizer) if new.schedule is not None else None
            (parallel.load or load_checkpoint)(parallel.module, new_optimizer, folder)
            if new_scheduler is not None:
                new_scheduler.load_state_dict(scheduler.state_dict())
            dist.barrier()
        finally:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        return local, new_optimizer, new_scheduler


@contextmanager
def without_ddp_log() -> Iterator[None]:
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP's note of how it was made takes the checking wrapper of gloo for gloo
    itself and dies (c10d::Logger::set_env_variables, torch 2.13). Nothing but that note is left out."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        yield
        return
    before = dist.Logger.set_construction_data_and_log
    dist.Logger.set_construction_data_and_log = lambda *_: None
    try:
        yield
    finally:
        dist.Logger.set_construction_data_and_log = before


def aliases(program: Program) -> dict[str, str]:
    """Every name of a parameter or buffer of the reference -> its first one (tied weights have several)."""
    if program.module is None:
        return {}
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for found in (program.module.named_parameters, program.module.named_buffers):
        for name, tensor in found(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def other_values(program: Program) -> Program:
    """The program with other parameters and buffers, so that one that is not loaded is seen."""
    state = {**program.parameters(), **program.buffers()}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in state:
            return tensor
        other = tensor.detach() * 0
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(other, requires_grad=tensor.requires_grad)
        return other

    return replace_tensors(program, change)


def shared_folder(rank: int) -> str:
    """A fresh folder that all ranks see, on one machine or a shared file system."""
    name = b""
    if rank == 0:
        # Where the ranks' supervisor removes what a killed worker leaves; see launch.folder.
        name = os.fsencode(tempfile.mkdtemp(prefix="checkpoint-", dir=os.environ.get(FOLDER)))
    # As bytes: torch's broadcast of objects would unpickle whatever arrives.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    letters = torch.zeros(_LONGEST_PATH, dtype=torch.uint8, device=device)
    letters[: len(name)] = torch.tensor(list(name), dtype=torch.uint8, device=device)
    dist.broadcast(letters, src=0)
    return os.fsdecode(bytes(letters.tolist()).rstrip(b"\0"))


def save_checkpoint(module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save as torch's documentation says: one state dict of module and optimizer, resharded when it is loaded."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(module, optimizer)
    checkpoint.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=Path(folder) / "checkpoint"
    )


def load_checkpoint(module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """The inverse of :func:`save_checkpoint`; the mesh and the plan may have changed in between."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=Path(folder) / "checkpoint")
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
