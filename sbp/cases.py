"""How people write down their own cases: a module, its inputs, and how it becomes parallel.

A case file is a Python file with cases at its top level::

    from sbp import case

    def megatron(module, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(module, mesh, plan)

    @case(plan=megatron)
    def mlp():
        return MLP(8, 16), torch.randn(4, 8)

``mpirun -n 4 python -m sbp.run my_cases.py`` runs it. See docs/write-a-case.md. This module needs neither torch
nor numpy, so that importing :mod:`sbp` costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sbp import packing

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Optimizer = torch.optim.Optimizer
    NamedParameters = list[tuple[str, torch.nn.Parameter]]


class CaseError(ValueError):
    """A case that makes no sense; one line that says what and what to do."""


# ------------------------------------------------------------------------------------ what is called


@dataclass(frozen=True)
class Call:
    """A module or function with what it is called with; made by :func:`call`.

    Attributes:
        function: a ``torch.nn.Module`` or a function of tensors.
        args, kwargs: full ("global") tensors, as one device has them; they may nest in tuples, lists, mappings
            and dataclasses. Floating tensors that require a gradient have theirs compared.
        targets: what the case's loss gets besides the output, such as labels; also full tensors.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()

    def against(self, *targets: Any) -> Call:
        """The same call with targets for the loss: they are named ``target``, ``target_2`` and so on."""
        return replace(self, targets=targets)


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
    """A call to check, for builders whose call has keyword arguments or targets:
    ``return call(model, tokens, mask=mask).against(labels)``."""
    return Call(function, args, kwargs)


# ------------------------------------------------------------------------------------- where it runs


@dataclass(frozen=True)
class World:
    """The ranks as hand-written code sees them; given to a case's ``spmd`` function on each rank.

    Attributes:
        rank, size: of this process among all ranks.
        device_mesh: all ranks as a DeviceMesh, its axes named as the case's ``axes``.
    """

    rank: int
    size: int
    device_mesh: DeviceMesh

    def group(self, axis: str | int = 0) -> ProcessGroup:
        """The process group of this rank along a mesh axis (with one axis: of all ranks)."""
        return self.device_mesh.get_group(axis)

    def rank_in(self, axis: str | int = 0) -> int:
        """This rank's place along a mesh axis."""
        return int(self.device_mesh.get_local_rank(axis))

    def size_of(self, axis: str | int = 0) -> int:
        """The number of ranks along a mesh axis."""
        index = axis if isinstance(axis, int) else (self.device_mesh.mesh_dim_names or ()).index(axis)
        return int(self.device_mesh.size(index))

    def comm(self) -> Any:
        """An mpi4py intracommunicator of all ranks, ordered as they are; made on the first call, which every
        rank must make. For code that talks MPI itself."""
        from sbp.subjects.mpi import make_communicator

        return make_communicator(self.rank, self.size)


@dataclass(frozen=True)
class Parallel:
    """What a plan or ``spmd`` function may return instead of the bare module, where more than the module is
    parallel code. What is left out is as in the case.

    Attributes:
        module: the module (or per-rank function) to call.
        loss: called as ``loss(output, *targets)`` with what this rank holds; returns this rank's loss.
        optimizer: called with the list of (name, parameter) of this rank's module, as ``Train.optimizer`` is.
        clip: called with the list of parameters after the backward pass; clips their gradients and returns the
            total norm.
        schedule: called with the optimizer; returns a learning-rate scheduler.
        synchronise: called with the module after the backward pass of the last micro-batch, before clipping: where
            hand-written code reduces its gradients.
        context: called with the arguments of each forward call; gives the context manager in which the forward
            pass, the loss and the backward pass run (``loss_parallel()``, ``context_parallel(...)``).
        forward: called as ``forward(*args, **kwargs)`` instead of the module, where what is called is not the
            object that holds the parameters.
        save, load: for ``Train.save_after``: ``save(module, optimizer, folder)`` and ``load(module, optimizer,
            folder)`` instead of torch.distributed.checkpoint. ``folder`` is a path that all ranks see.
    """

    module: Any
    loss: Callable[..., Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    clip: Callable[[list[Any]], Any] | None = None
    schedule: Callable[[Any], Any] | None = None
    synchronise: Callable[[Any], None] | None = None
    context: Callable[..., AbstractContextManager[Any]] | None = None
    forward: Callable[..., Any] | None = None
    save: Callable[[Any, Any, str], None] | None = None
    load: Callable[[Any, Any, str], None] | None = None


# ------------------------------------------------------- how hand-written code keeps its parameters


@dataclass(frozen=True)
class Packed:
    """How one of the per-rank module's parameters is made of the reference's; see :func:`packed`.

    Attributes:
        parts: names of the reference's parameters, or further packings.
        pack: from this rank's piece of each part to this rank's parameter.
        unpack: the inverse; given this rank's parameter (or its gradient, or its optimizer state) and the shapes
            of the pieces, gives the pieces.
        padding: dimension -> size up to which the reference's parameter is padded with zeros before it is cut.
    """

    parts: tuple[str | Packed, ...]
    pack: Callable[..., Any]
    unpack: Callable[[Any, Sequence[tuple[int, ...]]], Sequence[Any]]
    padding: Mapping[int, int] = field(default_factory=dict)


def fused(*parts: str | Packed, dim: int = 0, blocks: Sequence[int] = ()) -> Packed:
    """The pieces of several parameters in one, along ``dim``: this rank's q, then its k, then its v.

    With ``blocks`` they are interleaved: ``blocks=(8, 4, 4)`` is 8 rows of the first part, 4 of the second, 4 of
    the third, then the next 8 of the first, and so on, as code that groups the rows by heads keeps them.
    """
    sizes = tuple(blocks)
    return Packed(
        parts, partial(packing.fuse, dim=dim, blocks=sizes), partial(packing.unfuse, dim=dim, blocks=sizes)
    )


def transposed(part: str | Packed, dim0: int = -2, dim1: int = -1) -> Packed:
    """This rank's piece with two dimensions swapped. Its placement is said in the reference's dimensions."""
    return Packed(
        (part,),
        partial(packing.transpose, dim0=dim0, dim1=dim1),
        partial(packing.transpose_back, dim0=dim0, dim1=dim1),
    )


def padded(part: str, to: int, dim: int = 0) -> Packed:
    """The parameter padded with zeros along ``dim`` to size ``to`` before it is cut (a vocabulary). The padding
    itself is not compared."""
    return Packed((part,), packing.keep, packing.keep_back, {dim: to})


def packed(
    *parts: str,
    pack: Callable[..., Any],
    unpack: Callable[[Any, Sequence[tuple[int, ...]]], Sequence[Any]],
) -> Packed:
    """Any other way to keep the pieces of ``parts`` in one parameter.

    Args:
        parts: names of the reference's parameters.
        pack: called with this rank's piece of each; returns this rank's parameter.
        unpack: called with this rank's parameter, gradient or optimizer state and the shapes of the pieces; returns
            the pieces.
    """
    return Packed(parts, pack, unpack)


# ------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Train:
    """A case's training: ``steps`` optimizer steps, each on batches of its own, all of it compared.

    The batches come from calling the case's function again with another seed, so draw the inputs there.

    Attributes:
        steps: how many optimizer steps.
        optimizer: the name of one of torch's optimizers (``"AdamW"``), one of its variants (``"AdamW:foreach"``,
            ``"AdamW:fused"``, ``"AdamW:amsgrad"``), ``"all"`` for every one that torch tests, several of these,
            or a function from the list of (name, parameter) to an optimizer:
            ``partial(torch.optim.AdamW, lr=0.01)``. Each is a trial.
        clip_norm: gradients are clipped to this total norm, by ``torch.nn.utils.clip_grad_norm_``.
        schedule: from the optimizer to a learning-rate scheduler, stepped after each step.
        accumulate: micro-batches for each step; their losses are averaged.
        save_after: after this step everything is saved and loaded into a new module and optimizer.
        load_on: the mesh of the new module, such as ``"2x2"``; the same mesh where it is left out.
        load_into: another case, under whose plan, axes and placements the new module stands.
    """

    steps: int = 3
    optimizer: str | Callable[[Any], Any] | Sequence[str | Callable[[Any], Any]] = "SGD"
    clip_norm: float | None = None
    schedule: Callable[[Any], Any] | None = None
    accumulate: int = 1
    save_after: int | None = None
    load_on: str | None = None
    load_into: Case | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.accumulate < 1:
            raise CaseError("Train: steps and accumulate must be at least 1")
        if self.save_after is not None and not 1 <= self.save_after <= self.steps:
            raise CaseError(f"Train: save_after={self.save_after} is not one of the {self.steps} steps")
        if (self.load_on is not None or self.load_into is not None) and self.save_after is None:
            raise CaseError("Train: load_on and load_into need save_after, the step after which all is saved")


# -------------------------------------------------------------------------------------------- a case

Plan = Callable[[Any, Any], Any]
Spmd = Callable[[Any, World], Any]
Placed = str | Mapping[str, str]

_NAME = re.compile(r"[^\s/]+")


@dataclass(frozen=True)
class Case:
    """One thing to check; usually made by :func:`case`.

    Attributes:
        name: stands in ids; no white space and no ``/``.
        build: called without arguments, with torch's generator seeded; returns the module or function and its
            inputs: ``model, x`` or ``call(model, x, mask=mask).against(labels)``. All as on one device.
        plan: makes the module parallel: ``plan(module, device_mesh)`` returns the parallel module (None for one
            that was changed in place) or a :class:`Parallel`.
        spmd: hand-written per-rank code: ``spmd(module, world)`` returns this rank's module, function of this rank's
            tensors, or :class:`Parallel`. Its parameters are loaded by the harness from the reference's. ``module``
            is a copy of the reference, to take sizes from.
        placements: name -> how that tensor lies on the mesh, ``"S(0)"`` or, by axis, ``{"dp": "S(0)"}``; what is
            not named is B. With a plan or ``spmd``: of inputs and targets (what each rank is given), of outputs that
            are plain tensors, and with ``spmd`` of the reference's parameters and buffers. A gradient lies as its
            tensor does unless ``"NAME.grad"`` is named. With neither: held fixed while the others are tried.
        parameters: with ``spmd``: name of a per-rank parameter or buffer -> the reference's name, or how it is
            packed (:func:`fused`, :func:`transposed`, :func:`padded`, :func:`packed`). Names that both sides share
            need no entry.
        axes: the names of the mesh axes, such as ``("dp", "tp")``; as many axes as the mesh must have.
        meshes: the meshes to run on, such as ``("2x2",)``; those of another size than the world are left out.
            Without it, meshes that fit ``axes`` are chosen.
        mean_over: the mesh axes over which each rank's loss is the mean over its own part of the batch, and gradients
            are averaged (DDP, FSDP): the reference's loss is then the mean of the ranks' losses.
        dtensor_inputs: with a plan: inputs are DTensors instead of each rank's plain piece.
        loss: ``loss(output, *targets)``; a scalar. Without it the backward pass starts from random cotangents.
        train: optimizer steps; without it the case is one forward and backward pass.
        recompute: patterns of module names (``"layers.*"``) whose activations are recomputed in the backward pass
            (activation checkpointing) on the parallel side.
        autocast: run under ``torch.autocast`` with this dtype, such as ``"bfloat16"``.
        compile: run the parallel side under ``torch.compile`` with this backend, such as ``"aot_eager"``.
        gradients: False for code without a backward pass: one forward pass, without gradients.
        numpy: with ``spmd``: the code takes and returns numpy arrays. An object with a method ``backward`` is called
            with the cotangents of its outputs and returns gradients by name.
        random: the results are random (dropout): values are not compared, but replicas must agree and different
            parts must not repeat each other.
    """

    name: str
    build: Callable[[], Any]
    plan: Plan | None = None
    spmd: Spmd | None = None
    placements: Mapping[str, Placed] = field(default_factory=dict)
    parameters: Mapping[str, str | Packed] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()
    mean_over: tuple[str, ...] = ()
    dtensor_inputs: bool = False
    loss: Callable[..., Any] | None = None
    train: Train | None = None
    recompute: tuple[str, ...] = ()
    autocast: str | None = None
    compile: str | None = None
    gradients: bool = True
    numpy: bool = False
    random: bool = False

    def __post_init__(self) -> None:
        for name in ("axes", "meshes", "mean_over", "recompute"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if not _NAME.fullmatch(self.name):
            raise CaseError(f"{self.name!r} is not a case's name; use one without white space and /")
        if not callable(self.build):
            raise CaseError(
                f"case {self.name}: build must be a function that returns the module and its inputs"
            )
        if self.plan is not None and self.spmd is not None:
            raise CaseError(f"case {self.name}: give plan or spmd, not both")
        for name, need in (("parameters", "spmd"), ("numpy", "spmd"), ("dtensor_inputs", "plan")):
            if getattr(self, name) and getattr(self, need) is None:
                raise CaseError(f"case {self.name}: {name} has a meaning with {need} only")
        if not self.is_parallel:
            for name in ("mean_over", "loss", "recompute", "autocast", "compile", "random"):
                if getattr(self, name):
                    raise CaseError(f"case {self.name}: {name} needs a plan or spmd")
            if self.train is not None and self.train.save_after is not None:
                raise CaseError(f"case {self.name}: Train.save_after needs a plan or spmd")
        if self.train is not None and not self.gradients:
            raise CaseError(f"case {self.name}: training needs gradients")
        for axis in self.mean_over:
            if axis not in self.axis_names:
                raise CaseError(
                    f"case {self.name}: mean_over names the axis {axis!r}; the axes are {self.axis_names}"
                )
        for name, placed in self.placements.items():
            if not isinstance(placed, str):
                for axis in placed:
                    if axis not in self.axis_names:
                        raise CaseError(
                            f"case {self.name}: {name} is placed on the axis {axis!r}; "
                            f"the axes are {self.axis_names}"
                        )

    @property
    def is_parallel(self) -> bool:
        """Whether the case says how it becomes parallel, so that no placements are tried."""
        return self.plan is not None or self.spmd is not None

    @property
    def subject(self) -> str:
        return "spmd" if self.spmd is not None else "dtensor"

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the mesh axes; ``ranks`` where there is one axis and no name was given."""
        return self.axes or ("ranks",)

    def variant(self, name: str, **changes: Any) -> Case:
        """The same case under another name, with other settings: ``mlp.variant("mlp_fsdp", plan=fsdp)``."""
        return replace(self, name=name, **changes)

    def __call__(self) -> Any:
        """Build it; so that a decorated function can still be called."""
        return self.build()


Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def case(build: Callable[[], Any], /) -> Case: ...
@overload
def case(
    build: None = None, /, *, name: str = "", **settings: Any
) -> Callable[[Callable[[], Any]], Case]: ...
def case(
    build: Callable[[], Any] | None = None, /, *, name: str = "", **settings: Any
) -> Case | Callable[[Callable[[], Any]], Case]:
    """Make a function that builds a module and its inputs a :class:`Case`.

    Used bare (``@case``: placements are tried) or with the settings of :class:`Case`
    (``@case(plan=megatron, axes=("tp",))``). The case has the function's name unless ``name`` is given.

    Raises CaseError where the settings make no sense.
    """

    def decorate(function: Callable[[], Any]) -> Case:
        unknown = sorted(set(settings) - set(Case.__dataclass_fields__))
        if unknown:
            known = ", ".join(sorted(set(Case.__dataclass_fields__) - {"name", "build"}))
            raise CaseError(
                f"case {function.__name__}: no setting is called {unknown[0]!r}; there are: {known}"
            )
        return Case(name or function.__name__, function, **settings)

    return decorate if build is None else decorate(build)
