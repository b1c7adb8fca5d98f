"""PyTorch's DTensor as a subject: global tensors made from pieces, and what each rank then holds of the results.

Nothing is cut, gathered or redistributed by DTensor on the harness's behalf: ``DTensor.from_local`` wraps pieces
that placement.py cut, and results are read as the local piece with the placement that DTensor claims for it.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from sbp import placement as sbp_placement
from sbp.execute import MakeOptimizer, Quantity, execute
from sbp.placement import SBP, Mesh, parse_sbp, show
from sbp.program import WRITE, Program, replace_tensors, to_numpy, without_batch
from sbp.subjects.pieces import PieceCache
from sbp.verdict.compare import Observed

AXIS_NAMES = ("x", "y", "z", "w")


def to_torch(sbp: SBP) -> list[TorchPlacement]:
    """An SBP as DTensor writes it."""
    words: list[TorchPlacement] = []
    for placement in sbp:
        if placement.is_split:
            words.append(
                Shard(placement.dim)
                if placement.factor == 1
                else _StridedShard(placement.dim, split_factor=placement.factor)
            )
        elif placement.is_partial:
            words.append(Partial(placement.reduction))
        else:
            words.append(Replicate())
    return words


def from_torch(placements: tuple[TorchPlacement, ...]) -> str:
    """DTensor's placements as the text of an SBP."""
    return sbp_placement.show([_from_torch(placement) for placement in placements])


def _from_torch(placement: TorchPlacement) -> sbp_placement.Placement:
    if isinstance(placement, _StridedShard):
        return sbp_placement.S(placement.dim, placement.split_factor)
    if placement.is_shard():
        return sbp_placement.S(placement.dim)
    if placement.is_partial():
        norm = getattr(placement, "norm_type", None)
        if norm is not None:
            return sbp_placement.P(f"norm{norm}")
        return sbp_placement.P(placement.reduce_op)
    return sbp_placement.B


class DTensorSubject:
    """Runs programs as DTensors on this rank. One for each world of ranks.

    Args:
        rank: this process's rank in the world.
        device: ``cpu``, or ``cuda:N``.
    """

    name = "dtensor"

    def __init__(self, rank: int, device: str = "cpu") -> None:
        self.rank = rank
        self.device = torch.device(device)
        self._meshes: dict[Mesh, DeviceMesh] = {}
        self._pieces = PieceCache(rank)

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        """The DeviceMesh of that shape over all ranks; made once, by all ranks together."""
        if mesh not in self._meshes:
            self._meshes[mesh] = init_device_mesh(
                self.device.type, mesh.shape, mesh_dim_names=AXIS_NAMES[: mesh.ndim]
            )
        return self._meshes[mesh]

    def place(self, case: str, name: str, full: torch.Tensor, sbp_text: str, mesh: Mesh) -> DTensor:
        """``full`` as a global tensor; a leaf that requires a gradient where ``full`` does."""
        local = self._pieces.piece(case, name, full, sbp_text, mesh)
        placed = DTensor.from_local(
            local,
            self.device_mesh(mesh),
            to_torch(parse_sbp(sbp_text, mesh)),
            run_check=False,
            shape=full.shape,
            stride=full.contiguous().stride(),
        )
        return placed.requires_grad_(full.requires_grad)

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
        """Run ``program`` with its tensors placed as ``placements`` says (B where it says nothing), and put what
        this rank holds of each result into ``observed`` as soon as it is known.

        The cotangent of an output is placed by the name ``grad_`` and the output's name. Raises what the subject
        raises.
        """
        self.device_mesh(mesh)  # made before anything else, so that all ranks make it at the same point

        def place(name: str, full: torch.Tensor) -> torch.Tensor:
            placed = self.place(case, name, full, placements.get(without_batch(name), "B"), mesh)
            if isinstance(full, torch.nn.Parameter):
                return torch.nn.Parameter(placed.detach(), requires_grad=full.requires_grad)
            return placed

        def make_cotangent(name: str, output: torch.Tensor) -> torch.Tensor:
            full = torch.from_numpy(cotangents[name]).to(output.dtype).to(output.device)
            if not isinstance(output, DTensor):
                return full
            return self.place(case, f"grad_{name}", full, placements.get(f"grad_{name}", "B"), mesh)

        def observe(quantity: Quantity, tensor: torch.Tensor | None) -> None:
            seen = observe_tensor(quantity.name, quantity.kind, tensor)
            if quantity.kind == WRITE and program.keeps_placement:
                given = parse_sbp(placements.get(without_batch(quantity.of), "B"), mesh)
                if seen.claimed is not None and parse_sbp(seen.claimed, mesh) != given:
                    problem = f"the write changed its placement from {show(given)} to {seen.claimed}"
                    seen = replace(seen, problem=problem)
            observed[quantity.name] = seen

        from sbp.moves import DEVICE_MESH

        here = DEVICE_MESH.set(self.device_mesh(mesh))
        try:
            execute(replace_tensors(program, place), make_cotangent, observe, make_optimizer)
        finally:
            DEVICE_MESH.reset(here)


def observe_tensor(name: str, kind: str, tensor: torch.Tensor | None) -> Observed:
    """What this rank holds of ``tensor``, and what DTensor claims about it."""
    if tensor is None:
        return Observed(name, kind)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        return Observed(name, kind, None, tuple(tensor.shape), dtype, to_numpy(tensor))
    local = tensor._local_tensor.detach()
    for placement in tensor.placements:
        # The rows that another rank owns are garbage until this placement's mask has been applied: the mask
        # belongs to what the placement means.
        mask = placement.mask_buffer.data if isinstance(placement, _MaskPartial) else None
        if mask is not None:
            local = local.clone()
            local[mask] = 0
    if hasattr(local, "wait"):  # an asynchronous result that nobody has waited for yet
        local = local.wait()
    return Observed(name, kind, from_torch(tensor.placements), tuple(tensor.shape), dtype, to_numpy(local))


# Where what is made parallel for its users refuses: DTensor, FSDP, DDP.
_PATHS = ("/torch/distributed/tensor/", "/torch/distributed/fsdp/", "/torch/nn/parallel/")
# What a refusal says. An internal consistency check that fails ("output_specs has 3 outputs, which does not equal
# ...") is raised by the same code, but tells its user nothing about what is supported.
_REFUSING = re.compile(
    r"support|not implemented|does not have a sharding strategy|can ?not|not allowed|need to|please",
    re.IGNORECASE,
)
# Raised by DTensor's C++ dispatcher, so no line of Python shows it.
_REFUSED_IN_CPP = "need to convert all torch.Tensor to DTensor before calling distributed operators"


def is_refusal(error: BaseException) -> bool:
    """Whether the subject says clearly that it does not support this.

    True where DTensor's own code reached a ``raise`` statement, of a type that is meant for its user and with a
    message that refuses. An error from anywhere deeper (a kernel, an index, a meta function, an assertion, a
    collective) is not a refusal, also where DTensor only hands it on.
    """
    root = error
    while root.__cause__ is not None or (root.__context__ is not None and not root.__suppress_context__):
        root = root.__cause__ or root.__context__ or root
    if not isinstance(root, (NotImplementedError, RuntimeError, ValueError, TypeError)):
        return False
    if _REFUSED_IN_CPP in str(root):
        return True
    if not _REFUSING.search(str(root)):
        return False
    frame = _innermost(root.__traceback__)
    if frame is None:
        return False
    name, line = frame
    return any(path in name for path in _PATHS) and line.lstrip().startswith("raise ")


# How torch's kernels call a dtype that they do not take. In float64, where every trial has a reference, it would be a
# tensor of another dtype than the user's: that is an error.
_KERNEL_DTYPES = {"BFloat16": "bfloat16", "Half": "float16", "Float": "float32"}


def lacks_kernel(error: BaseException, dtype: str) -> bool:
    """Whether a kernel says that it does not take the trial's own ``dtype``, which it then does not on one device
    either."""
    found = re.search(r"not implemented for '(\w+)'", str(error))
    return (
        isinstance(error, (NotImplementedError, RuntimeError))
        and found is not None
        and _KERNEL_DTYPES.get(found[1]) == dtype
    )


def _innermost(trace: TracebackType | None) -> tuple[str, str] | None:
    """File and source line of the statement that raised (a ``raise`` may span lines: its first one counts)."""
    frames = traceback.extract_tb(trace)
    if not frames:
        return None
    last = frames[-1]
    return last.filename, linecache.getline(last.filename, last.lineno or 0)
