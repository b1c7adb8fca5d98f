"""What plans and hand-written per-rank code have in common as subjects: plain pieces for each rank, cotangents,
claims on the case's mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sbp import placement as sbp_placement
from sbp.cases import Case, CaseError, Parallel
from sbp.execute import MakeOptimizer, Quantity, Side, execute, side_of
from sbp.oracle.reference import copy_program
from sbp.placement import SBP, B, Mesh, P, parse_sbp, show
from sbp.program import Program, input_name, without_batch
from sbp.subjects.dtensor import from_torch, observe_tensor, to_torch
from sbp.subjects.pieces import PieceCache
from sbp.verdict.compare import Observed


@dataclass(frozen=True)
class Grid:
    """A mesh with the names of its axes, as a case sees it."""

    mesh: Mesh
    names: tuple[str, ...]
    device_mesh: DeviceMesh

    def resolve(self, case: Case, name: str, nested: bool = False) -> SBP | None:
        """The SBP that the case declares for a tensor; None where it says nothing.

        With ``nested``, what is said of ``output`` holds for ``output[0]`` and ``output.logits`` too, unless these
        are named. Raises PlacementError.
        """
        placed = case.placements.get(name)
        if placed is None and nested:
            placed = case.placements.get(re.split(r"[\[.]", name, maxsplit=1)[0])
        if placed is None:
            return None
        if isinstance(placed, str):
            return parse_sbp(placed, self.mesh)
        return tuple(sbp_placement.parse(placed[axis]) if axis in placed else B for axis in self.names)

    def gradient(self, case: Case, name: str, nested: bool = False) -> SBP | None:
        """How the gradient of a tensor lies: as declared, or as the tensor does."""
        declared = self.resolve(case, f"{name}.grad")
        if declared is None:
            of = self.resolve(case, name, nested)
            declared = gradient_sbp(of) if of is not None else None
        return declared

    def along(self, axes: tuple[str, ...]) -> list[int]:
        return [index for index, name in enumerate(self.names) if name in axes]


class Grids:
    """The DeviceMeshes of this rank, made once by all ranks together."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._made: dict[tuple[Mesh, tuple[str, ...]], Grid] = {}

    def grid(self, case: Case, mesh: Mesh) -> Grid:
        """Raises CaseError where the mesh has another number of axes than the case."""
        names = case.axis_names
        if len(names) != mesh.ndim:
            raise CaseError(
                f"case {case.name} has the axes {', '.join(names)}, but mesh {mesh} has {mesh.ndim} axes"
            )
        key = mesh, names
        if key not in self._made:
            made = init_device_mesh(self.device_type, mesh.shape, mesh_dim_names=names)
            self._made[key] = Grid(mesh, names, made)
        return self._made[key]


# ---------------------------------------------------------------------------------- inputs and cotangents


def gradient_sbp(sbp: SBP) -> SBP:
    """How the gradient of a tensor lies that lies so: partial pieces of a sum each have the whole gradient."""
    return tuple(B if placement.is_partial else placement for placement in sbp)


def mean_factor(sbp: SBP, grid: Grid, case: Case) -> float:
    """What a rank's cotangent is multiplied with, since its loss is the mean over its own part along some axes and
    gradients are averaged there; and since the pieces of a P(avg) are averaged."""
    factor = 1.0
    for axis, placement in enumerate(sbp):
        mean = grid.names[axis] in case.mean_over
        averaged = placement == P("avg")
        if mean and (placement.is_split or (placement.is_partial and not averaged)):
            factor *= grid.mesh.shape[axis]
        if averaged and not mean:
            factor /= grid.mesh.shape[axis]
    return factor


def local_inputs(
    program: Program, case_id: str, case: Case, grid: Grid, pieces: PieceCache, as_dtensors: bool
) -> tuple[Program, dict[str, float]]:
    """The program with what this rank is given of each input, and how much larger each input's gradient is here than
    the reference's."""
    scales: dict[str, float] = {}
    state = {**program.parameters(), **program.buffers()}

    def place(name: str, full: torch.Tensor) -> torch.Tensor:
        base = without_batch(name)
        sbp = grid.resolve(case, input_name(base, state), nested=True) or (B,) * grid.mesh.ndim
        local = pieces.piece(case_id, name, full, show(sbp), grid.mesh)
        scales[base] = mean_factor(gradient_sbp(sbp), grid, case)
        if as_dtensors:
            local = DTensor.from_local(
                local,
                grid.device_mesh,
                to_torch(sbp),
                run_check=False,
                shape=full.shape,
                stride=full.contiguous().stride(),
            )
        return local.requires_grad_(full.requires_grad)

    return program.with_inputs(place), scales


def local_cotangent(
    name: str,
    full: np.ndarray[Any, Any],
    output: torch.Tensor,
    case_id: str,
    case: Case,
    grid: Grid,
    pieces: PieceCache,
) -> torch.Tensor:
    """What this rank goes backward from at one of its outputs."""
    claim = claim_of(output, grid.resolve(case, name, nested=True), grid)
    if claim.mesh is not None:
        raise CaseError(f"{name} lies on another mesh than the case's; give the case a loss")
    sbp = claim.sbp if claim.sbp is not None else (B,) * grid.mesh.ndim
    due = grid.resolve(case, f"{name}.grad") or gradient_sbp(sbp)
    whole = torch.from_numpy(np.asarray(full)).to(output.dtype).to(output.device)
    local = pieces.piece(case_id, f"grad_{name}", whole, show(due), grid.mesh)
    factor = mean_factor(sbp, grid, case)
    if factor != 1.0:
        local = local * factor
    if not isinstance(output, DTensor):
        return local
    own = output.device_mesh
    places = [sbp_placement.B if p.is_partial else p for p in claim.own]
    return DTensor.from_local(
        local, own, to_torch(tuple(places)), run_check=False, shape=output.shape, stride=output.stride()
    )


def loss_sbp(case: Case, grid: Grid, inputs: Mapping[str, torch.Tensor]) -> SBP | None:
    """How the loss lies: declared, or the mean of the ranks' losses along the axes of ``mean_over`` that split some
    input."""
    declared = grid.resolve(case, "loss")
    if declared is not None or not case.mean_over:
        return declared
    split_axes: set[int] = set()
    for name in inputs:
        sbp = grid.resolve(case, name, nested=True)
        split_axes |= {axis for axis, placement in enumerate(sbp or ()) if placement.is_split}
    mean_axes = set(grid.along(case.mean_over)) & split_axes
    return tuple(P("avg") if axis in mean_axes else B for axis in range(grid.mesh.ndim))


# ------------------------------------------------------------------------------------------------ claims


@dataclass(frozen=True)
class Claim:
    """How a tensor lies, as far as it says so.

    Attributes:
        sbp: on the case's mesh, or on ``mesh``; None where nothing is known, so that it must be whole everywhere.
        mesh: where the tensor lies on another mesh of all ranks.
        own: the placements along the tensor's own mesh axes.
        problem: what is wrong with the claim.
    """

    sbp: SBP | None
    mesh: Mesh | None = None
    own: SBP = ()
    problem: str = ""


def claim_of(tensor: torch.Tensor, declared: SBP | None, grid: Grid) -> Claim:
    """A DTensor's own claim, put on the case's mesh; what is declared for anything else.

    A DTensor on a part of the mesh (the tensor-parallel axis alone) says nothing about the other axes: there it lies
    as declared, or B.
    """
    if not isinstance(tensor, DTensor):
        return Claim(declared)
    own = parse_sbp(from_torch(tensor.placements))
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    if names and all(name in grid.names for name in names):
        known = {grid.names.index(name): placement for name, placement in zip(names, own, strict=True)}
        rest = declared or (B,) * grid.mesh.ndim
        sbp = tuple(known.get(axis, rest[axis]) for axis in range(grid.mesh.ndim))
        problem = ""
        if declared is not None and not _same(sbp, declared, tensor.ndim):
            problem = f"it claims {show(sbp)}, the case declares {show(declared)}"
        return Claim(sbp, None, own, problem)
    ranks = mesh.mesh.reshape(-1).tolist()
    if ranks == list(range(grid.mesh.size)):
        return Claim(own, Mesh(tuple(mesh.shape)), own)
    return Claim(None, None, own, f"it lies on a mesh of ranks {ranks} with the axes {names}")


def _same(one: SBP, other: SBP, ndim: int) -> bool:
    try:
        return sbp_placement.normalise(one, ndim) == sbp_placement.normalise(other, ndim)
    except sbp_placement.PlacementError:
        return False


def observe_claimed(
    quantity: Quantity, tensor: torch.Tensor | None, declared: SBP | None, grid: Grid
) -> Observed:
    """What this rank holds of a quantity, with its claim on the case's mesh."""
    seen = observe_tensor(quantity.name, quantity.kind, tensor)
    if tensor is None:
        return seen
    claim = claim_of(tensor, declared, grid)
    if claim.sbp is None and not claim.problem:
        return seen
    return replace(
        seen,
        claimed=show(claim.sbp or claim.own),
        # A tensor on a part of the mesh, like a plain one, does not know the shape of the whole.
        shape=seen.shape if claim.mesh is not None or _knows_shape(tensor, grid) else None,
        mesh=str(claim.mesh) if claim.mesh is not None else None,
        problem=claim.problem,
    )


def _knows_shape(tensor: torch.Tensor, grid: Grid) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh.size() == grid.mesh.size


# ----------------------------------------------------------------------------- what is done to the module


def as_parallel(made: Any, module: Any, what: str) -> Parallel:
    """What a plan or spmd function returned, as a Parallel. Raises CaseError."""
    if made is None:
        made = module
    parallel = made if isinstance(made, Parallel) else Parallel(made)
    if not callable(parallel.module) and parallel.forward is None and not hasattr(parallel.module, "forward"):
        raise CaseError(f"{what} must return a module, a function or a Parallel, not {type(made).__name__}")
    return parallel


def call_of(parallel: Parallel, case: Case, clean_names: Mapping[str, str]) -> Callable[..., Any]:
    """What is called for a forward pass, with activation checkpointing and torch.compile as the case says."""
    module = parallel.module
    if case.recompute:
        _recompute(module, case, clean_names)
    called: Callable[..., Any] = parallel.forward or (module if callable(module) else module.forward)
    if case.compile is not None:
        called = torch.compile(called, backend=case.compile)
    return called


def _recompute(module: Any, case: Case, clean_names: Mapping[str, str]) -> None:
    """Have the forward of the modules that the case names recomputed in the backward pass.

    Their hooks, and with them what plans and FSDP add, stay outside.
    """
    found = False
    for name, child in module.named_modules():
        if any(fnmatchcase(clean_names.get(name, name), pattern) for pattern in case.recompute):
            child.forward = partial(checkpoint, child.forward, use_reentrant=False)
            found = True
    if not found:
        raise CaseError(f"case {case.name}: no module is called {' or '.join(map(repr, case.recompute))}")


_WRAPPING = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean_module_names(root: torch.nn.Module) -> dict[str, str]:
    """Each module's path -> its path without what wrappers added (DDP, torch.compile, checkpoint_wrapper)."""
    names: dict[str, str] = {"": ""}
    for path, module in root.named_modules(remove_duplicate=False):
        here = names[path]
        transparent = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        for child, value in module._modules.items():
            if value is None:
                continue
            inner = f"{path}.{child}" if path else child
            if child in _WRAPPING or (transparent and child == "module"):
                names[inner] = here
            else:
                names[inner] = f"{here}.{child}" if here else child
    return names


def copy_reference(program: Program) -> Any:
    """A copy of the module (or the function) for a plan to work on."""
    return copy_program(program).function


class ParallelSubject:
    """Runs a case whose parallel form the case itself says. One for each trial.

    Args:
        case: the user's case.
        rank: this process's rank in the world.
        grids, pieces: kept for all trials of a world.
    """

    name = "dtensor"

    def __init__(self, case: Case, rank: int, grids: Grids, pieces: PieceCache) -> None:
        self.case = case
        self.rank = rank
        self.grids = grids
        self.pieces = pieces
        # The parallel module of the run, for whoever wants to look into it.
        self.parallel: Parallel | None = None
        self.grid: Grid | None = None
        self._mesh: Mesh | None = None

    def note(self, observed: dict[str, Observed], seen: Observed) -> None:
        """Put what was seen into ``observed``; after loading into another mesh, the claim is on that one."""
        assert self.grid is not None
        if seen.claimed is not None and seen.mesh is None and self.grid.mesh != self._mesh:
            seen = replace(seen, mesh=str(self.grid.mesh))
        observed[seen.name] = seen

    def set_up(
        self, program: Program, case_id: str, mesh: Mesh, make_optimizer: MakeOptimizer | None
    ) -> tuple[Program, Side]:
        """The program with this rank's inputs, and the parallel side of its run."""
        raise NotImplementedError

    def observer(self, observed: dict[str, Observed]) -> Callable[[Quantity, torch.Tensor | None], None]:
        """Puts what this rank holds into ``observed``."""
        raise NotImplementedError

    def comparable(self, expected: Mapping[str, Any], observed: Mapping[str, Observed]) -> dict[str, Any]:
        """The reference's quantities without those that this side need not have."""
        if self.parallel is None or self.parallel.optimizer is None:
            return dict(expected)
        # An optimizer of its own may keep its state elsewhere (ZeRO): what it keeps is compared, what not is not
        # missing, since the parameters show whether it was right.
        return {name: due for name, due in expected.items() if name in observed or not _is_kept(name)}

    def run(
        self,
        program: Program,
        case: str,
        mesh: Mesh,
        placements: Mapping[str, str],
        cotangents: Mapping[str, np.ndarray[Any, Any]],
        observed: dict[str, Observed],
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        """Like :meth:`sbp.subjects.dtensor.DTensorSubject.run`; the placements are the case's own."""
        self._mesh = mesh
        local, side = self.set_up(program, case, mesh, make_optimizer)
        assert self.grid is not None

        def make_cotangent(name: str, output: torch.Tensor) -> torch.Tensor:
            assert self.grid is not None
            return local_cotangent(name, cotangents[name], output, case, self.case, self.grid, self.pieces)

        execute(local, make_cotangent, self.observer(observed), make_optimizer, side)

    def side(
        self,
        program: Program,
        parallel: Parallel,
        call: Callable[..., Any],
        make_optimizer: MakeOptimizer | None,
        scales: dict[str, float],
    ) -> Side:
        """The program's own side with what is parallel code put in."""
        plain = side_of(program, make_optimizer)
        return replace(
            plain,
            call=call,
            make_optimizer=(parallel.optimizer or make_optimizer) if make_optimizer is not None else None,
            loss=parallel.loss or plain.loss,
            clip=parallel.clip or plain.clip,
            schedule=parallel.schedule or plain.schedule,
            synchronise=partial(parallel.synchronise, parallel.module) if parallel.synchronise else None,
            context=parallel.context,
            input_scales=scales,
        )


def _is_kept(name: str) -> bool:
    """Whether a quantity is optimizer state: ``exp_avg of fc.weight after step 1``."""
    return " of " in name and " after " in name
