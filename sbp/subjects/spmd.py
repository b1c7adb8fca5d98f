"""Hand-written per-rank code as a subject: plain tensors (or numpy arrays) on each rank, and collectives inside.

Nothing about it is known but what the case declares: how inputs, outputs and parameters lie, and how its parameters
are made of the reference's.
"""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sbp.cases import Case, CaseError, Packed, Parallel, World
from sbp.execute import MakeOptimizer, Named, Quantity, Side
from sbp.packing import pad
from sbp.placement import SBP, B, Mesh, S, chunk_bounds, local_shape, parse_mesh, show
from sbp.program import GRADIENT, STATE, VALUE, Program, to_numpy
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
from sbp.subjects.pieces import PieceCache
from sbp.subjects.planned import aliases, shared_folder
from sbp.verdict.compare import Observed


@dataclass(frozen=True)
class Part:
    """A per-rank tensor, or a part of one, as made of the reference's tensors.

    Attributes:
        shape: on this rank.
        name: the reference's tensor; empty where this is packed of ``parts``.
        sbp: how ``name`` is cut on the mesh.
        held: the shape of this rank's piece of ``name`` without padding.
    """

    shape: tuple[int, ...]
    name: str = ""
    sbp: SBP = ()
    held: tuple[int, ...] = ()
    packing: Packed | None = None
    parts: tuple[Part, ...] = ()

    def names(self) -> Iterator[str]:
        """The reference's tensors in it."""
        if self.name:
            yield self.name
        for part in self.parts:
            yield from part.names()

    def unpack(self, tensor: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """The pieces of the reference's tensors in ``tensor``, a tensor of this rank that lies like the parameter."""
        if self.name:
            yield self, tensor[tuple(slice(0, size) for size in self.held)]
            return
        assert self.packing is not None
        pieces = self.packing.unpack(tensor, [part.shape for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            if tuple(piece.shape) != part.shape:
                raise CaseError(
                    f"unpack gave a piece of shape {tuple(piece.shape)} for {part.name or 'a part'}, "
                    f"pack was given {part.shape}"
                )
            yield from part.unpack(piece)


class Loader:
    """Cuts and packs the reference's parameters for one rank."""

    def __init__(self, program: Program, case_id: str, case: Case, grid: Grid, pieces: PieceCache) -> None:
        self.case = case
        self.case_id = case_id
        self.grid = grid
        self.pieces = pieces
        self.full: dict[str, torch.Tensor] = {**program.parameters(), **program.buffers()}
        self.aliases = aliases(program)

    def load(self, local: str, spec: str | Packed) -> tuple[Part, torch.Tensor]:
        """This rank's value for its parameter ``local``, and how it is made. Raises CaseError."""
        if isinstance(spec, Packed) and spec.padding:
            [part] = spec.parts
            if not isinstance(part, str):
                raise CaseError(f"case {self.case.name}: padded() takes the name of a parameter")
            return self._cut(local, part, dict(spec.padding))
        if isinstance(spec, Packed):
            loaded = [self.load(local, part) for part in spec.parts]
            try:
                whole = spec.pack(*(tensor for _, tensor in loaded))
            except (
                ValueError,
                RuntimeError,
            ) as error:  # numpy's and torch's words for shapes that do not fit
                raise CaseError(f"case {self.case.name}: {local}: {error}") from error
            return Part(tuple(whole.shape), packing=spec, parts=tuple(part for part, _ in loaded)), whole
        return self._cut(local, spec, {})

    def _cut(self, local: str, name: str, padding: dict[int, int]) -> tuple[Part, torch.Tensor]:
        name = self.aliases.get(name, name)
        if name not in self.full:
            raise CaseError(
                f"case {self.case.name}: the per-rank module has {local}, which is none of the reference's "
                f"({', '.join(self.full) or 'it has none'}); say in parameters= what {local} is made of"
            )
        full, mesh = self.full[name], self.grid.mesh
        sbp = self.grid.resolve(self.case, name) or (B,) * mesh.ndim
        if not padding:
            piece = self.pieces.piece(self.case_id, name, full, show(sbp), mesh)
            return Part(tuple(piece.shape), name, sbp, tuple(piece.shape)), piece
        padding = {dim % full.ndim: size for dim, size in padding.items()}
        try:
            long = pad(full.detach(), padding)
        except ValueError as error:
            raise CaseError(f"case {self.case.name}: {name}: {error}") from error
        piece = self.pieces.piece(self.case_id, f"{name} padded {padding}", long, show(sbp), mesh)
        # Without the padding the pieces are no longer what torch.chunk gives: say their sizes.
        claimed = tuple(
            S(p.dim, sizes=_chunk_sizes(long.shape[p.dim], mesh.shape[axis]))
            if p.is_split and p.dim % full.ndim in padding
            else p
            for axis, p in enumerate(sbp)
        )
        if sum(p.is_split and p.dim % full.ndim in padding for p in sbp) > 1:
            raise CaseError(f"case {self.case.name}: {name} is padded and cut along more than one mesh axis")
        held = local_shape(tuple(full.shape), claimed, mesh, self.pieces.rank)
        return Part(tuple(piece.shape), name, claimed, held), piece


def floating_dtype(program: Program) -> torch.dtype | None:
    """The one dtype of the reference's floating parameters, or of its inputs where it has none; None if there are
    several."""
    tensors = program.parameters() or program.inputs()
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    bounds = (chunk_bounds(size, parts, index) for index in range(parts))
    return tuple(stop - start for start, stop in bounds)


class SpmdSubject(ParallelSubject):
    """See the module's docstring."""

    name = "spmd"

    def set_up(
        self, program: Program, case_id: str, mesh: Mesh, make_optimizer: MakeOptimizer | None
    ) -> tuple[Program, Side]:
        self.grid = self.grids.grid(self.case, mesh)
        self._settings = self.case
        self._loss_sbp = loss_sbp(self.case, self.grid, program.inputs())
        self._not_kept: set[str] = set()
        self._buffers_before = {name: to_numpy(buffer) for name, buffer in program.buffers().items()}
        parallel, call = self._make_parallel(program, case_id, self.case, self.grid)
        local, scales = local_inputs(program, case_id, self.case, self.grid, self.pieces, False)
        side = self.side(local, parallel, call, make_optimizer, scales)
        side.parameters = self._parameters
        side.buffers = self._buffers
        train = self.case.train
        if train is not None and train.save_after is not None:
            side.reload = lambda optimizer, scheduler: self._reload(
                program, case_id, mesh, side, make_optimizer, optimizer, scheduler
            )
        return local, side

    def _make_parallel(
        self, program: Program, case_id: str, case: Case, grid: Grid
    ) -> tuple[Parallel, Callable[..., Any]]:
        world = World(self.rank, grid.mesh.size, grid.device_mesh)
        reference = copy_reference(program)
        assert case.spmd is not None
        made = as_parallel(case.spmd(reference, world), reference, f"the spmd function of case {case.name}")
        loader = Loader(program, case_id, case, grid, self.pieces)
        if isinstance(made.module, torch.nn.Module):
            # Per-rank code need not know in which dtype this trial runs.
            dtype = floating_dtype(program)
            if dtype is not None:
                made.module.to(dtype)
            if not case.gradients:
                made.module.requires_grad_(False)
        if case.numpy and not isinstance(made.module, torch.nn.Module):
            made = replace(made, module=NumpyModule(made.module, case, loader, program.argument_names()))
        self.parallel = made
        self._parts: dict[str, Part] = {}
        self._load(made.module, case, loader)
        names = {}
        if isinstance(made.module, torch.nn.Module):
            names = clean_module_names(made.module)
        return made, call_of(made, case, names)

    def _load(self, module: Any, case: Case, loader: Loader) -> None:
        """Copy this rank's part of the reference into the per-rank module, and note how each tensor is made."""
        if not isinstance(module, torch.nn.Module):
            if case.parameters:
                raise CaseError(
                    f"case {case.name}: parameters= names {', '.join(case.parameters)}, but the spmd function "
                    "returned no torch.nn.Module that could have them"
                )
            return
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for local in case.parameters:
            if local not in tensors:
                raise CaseError(
                    f"case {case.name}: parameters= names {local}, but the per-rank module has "
                    f"{', '.join(tensors) or 'none'}"
                )
        for local, tensor in tensors.items():
            spec = case.parameters.get(local, local)
            known = local in case.parameters or loader.aliases.get(local, local) in loader.full
            if not known and not isinstance(tensor, torch.nn.Parameter):
                continue  # a constant of its own, such as a mask
            part, value = loader.load(local, spec)
            if part.shape != tuple(tensor.shape):
                made = " and ".join(
                    f"{name} as {show(loader.grid.resolve(case, name) or (B,) * loader.grid.mesh.ndim)}"
                    for name in part.names()
                )
                raise CaseError(
                    f"case {case.name}: {local} has shape {tuple(tensor.shape)} on rank {self.rank}, "
                    f"but {made} gives it {part.shape}; declare its placement, or say in parameters= how it is made"
                )
            with torch.no_grad():
                tensor.copy_(value)
            self._parts[local] = part

    def _parameters(self) -> Named:
        module = self.parallel.module if self.parallel is not None else None
        return list(module.named_parameters()) if isinstance(module, torch.nn.Module) else []

    def _buffers(self) -> list[tuple[str, torch.Tensor | None]]:
        module = self.parallel.module if self.parallel is not None else None
        if not isinstance(module, torch.nn.Module):
            return []
        return [(name, buffer) for name, buffer in module.named_buffers() if name in self._parts]

    def observer(self, observed: dict[str, Observed]) -> Callable[[Quantity, torch.Tensor | None], None]:
        def observe(quantity: Quantity, tensor: torch.Tensor | None) -> None:
            part = self._parts.get(quantity.of)
            if part is not None:
                self._observe_part(quantity, part, tensor, observed)
                return
            assert self.grid is not None
            if quantity.of == "loss" and quantity.kind == VALUE:
                declared = self._loss_sbp
            elif quantity.kind == GRADIENT:
                declared = self.grid.gradient(self._settings, quantity.of, nested=True)
            else:
                declared = self.grid.resolve(self._settings, quantity.of, nested=True)
            self.note(observed, observe_claimed(quantity, tensor, declared, self.grid))

        return observe

    def _observe_part(
        self, quantity: Quantity, part: Part, tensor: torch.Tensor | None, observed: dict[str, Observed]
    ) -> None:
        """Note what a per-rank parameter (its gradient, its optimizer state) says of the reference's."""
        assert self.grid is not None
        pieces: list[tuple[str, SBP | None, torch.Tensor | None]]
        if tensor is None:
            pieces = [(name, None, None) for name in part.names()]
        elif tuple(tensor.shape) == part.shape:
            pieces = []
            for leaf, piece in part.unpack(tensor):
                declared = self.grid.resolve(self._settings, f"{leaf.name}.grad")
                own = declared if quantity.kind == GRADIENT and declared is not None else leaf.sbp
                pieces.append((leaf.name, own, piece))
        elif tensor.ndim == 0:
            pieces = [(name, None, tensor) for name in part.names()]
        else:
            # State of another shape (Adafactor's row and column means) is not cut as the parameter is.
            self._not_kept.update(quantity._replace(of=name).name for name in part.names())
            return
        for name, sbp, piece in pieces:
            seen = observe_claimed(quantity._replace(of=name), piece, sbp, self.grid)
            if seen.name in observed:  # two tensors on this rank that stand for one: tied weights
                label = f"{name} (as {quantity.of})"
                seen = replace(seen, name=quantity.words.replace("{}", label), like=seen.name)
            self.note(observed, seen)

    def comparable(self, expected: Mapping[str, Any], observed: Mapping[str, Observed]) -> dict[str, Any]:
        kept = super().comparable(expected, observed)
        held = {name for part in self._parts.values() for name in part.names()}
        assert self.grid is not None
        return {
            name: due
            for name, due in kept.items()
            if name in observed or not (name in self._not_kept or self._is_constant(name, due, held))
        }

    def _is_constant(self, name: str, due: Any, held: set[str]) -> bool:
        """Whether it is a buffer that the reference never changes (a mask, a table of positions) and that the
        per-rank code need not have."""
        buffer = name.partition(" after ")[0]
        if due.kind != STATE or buffer in held or buffer not in self._buffers_before:
            return False
        return due.value is not None and np.array_equal(due.value, self._buffers_before[buffer])

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
        """Save, then load into a new per-rank module; on another mesh the code itself must save and load."""
        train, before = self.case.train, self.parallel
        assert train is not None and before is not None
        into = train.load_into or self.case
        new_mesh = parse_mesh(train.load_on) if train.load_on is not None else mesh
        moved = into is not self.case or new_mesh != mesh
        if (before.save is None) != (before.load is None) or (moved and before.save is None):
            raise CaseError(
                f"case {self.case.name}: hand-written code is saved and loaded by the save and load of its Parallel; "
                "give both" + (" to load into another mesh or case" if moved else "")
            )
        grid = self.grids.grid(into, new_mesh)
        folder = shared_folder(self.rank)
        try:
            memory = io.BytesIO()
            if before.save is not None:
                before.save(before.module, optimizer, folder)
            else:
                torch.save([before.module.state_dict(), optimizer.state_dict()], memory)
            dist.barrier()
            parallel, call = self._make_parallel(program, case_id, into, grid)
            with torch.no_grad():
                for tensor in parallel.module.state_dict(keep_vars=True).values():
                    tensor.zero_()
            self.grid, self._settings = grid, into
            self._loss_sbp = loss_sbp(into, grid, program.inputs())
            local, scales = local_inputs(program, case_id, into, grid, self.pieces, False)
            new = self.side(local, parallel, call, make_optimizer, scales)
            for name in ("call", "loss", "clip", "synchronise", "context", "input_scales"):
                setattr(side, name, getattr(new, name))
            assert new.make_optimizer is not None
            new_optimizer = new.make_optimizer(self._parameters())
            new_scheduler = new.schedule(new_optimizer) if new.schedule is not None else None
            if parallel.load is not None:
                parallel.load(parallel.module, new_optimizer, folder)
            else:
                memory.seek(0)
                module_state, optimizer_state = torch.load(memory, weights_only=True)
                parallel.module.load_state_dict(module_state)
                new_optimizer.load_state_dict(optimizer_state)
            if new_scheduler is not None:
                new_scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
            dist.barrier()
        finally:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        return local, new_optimizer, new_scheduler


class NumpyModule(torch.nn.Module):
    """Per-rank code on numpy arrays, as a module: its parameters are those that the case's ``parameters`` (or the
    reference) name; they are set as attributes of the object before each call."""

    def __init__(self, code: Any, case: Case, loader: Loader, input_names: tuple[str, ...]) -> None:
        super().__init__()
        self.code = code
        self.input_names = input_names
        self.case = case
        names = [name for name in loader.full if _has(code, name) and name not in case.parameters]
        self.local_names = [*case.parameters, *names]
        for index, local in enumerate(self.local_names):
            _, value = loader.load(local, case.parameters.get(local, local))
            # Attribute paths hold dots, which names of parameters must not: see named_parameters.
            self.register_parameter(f"p{index}", torch.nn.Parameter(value.detach().clone()))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, local in enumerate(self.local_names):
            yield local, getattr(self, f"p{index}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        plain = [value for value in (*args, *kwargs.values()) if not isinstance(value, torch.Tensor)]
        if len(tensors) != len(args) + len(kwargs) and any(isinstance(v, (list, tuple, dict)) for v in plain):
            raise CaseError(f"case {self.case.name}: numpy code takes arrays and numbers, not nested ones")
        parameters = [tensor for _, tensor in self.named_parameters()]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*tensors, *parameters)):
            return self._call([to_numpy(p) for p in parameters], args, kwargs)
        if not hasattr(self.code, "backward"):
            raise CaseError(
                f"case {self.case.name}: the numpy code has no method backward(*cotangents); add one that returns "
                "gradients by name, or say gradients=False"
            )
        return _NumpyCall.apply(self, list(kwargs), len(args), *args, *kwargs.values(), *parameters)

    def _call(
        self, parameters: list[np.ndarray[Any, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        for local, value in zip(self.local_names, parameters, strict=True):
            owner, _, key = local.rpartition(".")
            target = self.code
            for word in owner.split(".") if owner else []:
                target = getattr(target, word)
            setattr(target, key, value)
        called = self.code if callable(self.code) else self.code.forward
        result = called(*map(_to_array, args), **{name: _to_array(value) for name, value in kwargs.items()})
        if isinstance(result, (tuple, list)):
            return tuple(torch.from_numpy(np.array(part)) for part in result)
        return torch.from_numpy(np.array(result))


class _NumpyCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: NumpyModule, keys: list[str], count: int, *tensors: Any) -> Any:
        ctx.module = module
        positional, rest = tensors[:count], tensors[count:]
        named = dict(zip(keys, rest, strict=False))
        ctx.inputs = (positional, named)
        ctx.count = len(tensors)
        parameters = rest[len(keys) :]
        return module._call([to_numpy(p) for p in parameters], positional, named)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        module = ctx.module
        gradients = module.code.backward(*map(_to_array, cotangents))
        if not isinstance(gradients, Mapping):
            raise CaseError(f"case {module.case.name}: backward must return gradients by name")
        _, named = ctx.inputs
        names = [*module.input_names, *named, *module.local_names]
        unknown = sorted(set(gradients) - set(names))
        if unknown:
            raise CaseError(
                f"case {module.case.name}: backward returned a gradient of {unknown[0]}; "
                f"there are {', '.join(names)}"
            )
        made = [
            torch.from_numpy(np.array(gradients[name])) if gradients.get(name) is not None else None
            for name in names
        ]
        return None, None, None, *made


def _to_array(value: Any) -> Any:
    return to_numpy(value) if isinstance(value, torch.Tensor) else value


def _has(code: Any, path: str) -> bool:
    for word in path.split("."):
        if not hasattr(code, word):
            return False
        code = getattr(code, word)
    return True
