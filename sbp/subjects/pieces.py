"""This rank's pieces of the inputs, cut by placement.py and kept for the trials that follow."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from sbp.placement import Array, Mesh, parse_sbp, show, split
from sbp.program import to_numpy
from sbp.trial import stable_seed

_LIMIT = 4096


class PieceCache:
    """Cuts tensors for one rank. The same name, placement and mesh of one case always gives the same pieces, on
    every rank and in every run."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._pieces: OrderedDict[tuple[str, str, str, str, torch.dtype], torch.Tensor] = OrderedDict()

    def piece(self, case: str, name: str, full: torch.Tensor, sbp_text: str, mesh: Mesh) -> torch.Tensor:
        """A fresh copy of this rank's piece of ``full``, on its device.

        Raises PlacementError where the placement does not fit the tensor.
        """
        key = (case, name, sbp_text, str(mesh), full.dtype)
        kept = self._pieces.get(key)
        if kept is None:
            local = _pieces(case, name, full, sbp_text, mesh)[self.rank]
            kept = torch.from_numpy(np.array(local)).to(full.dtype).to(full.device)
            self._pieces[key] = kept
            if len(self._pieces) > _LIMIT:
                self._pieces.popitem(last=False)
        return kept.clone()


def _pieces(case: str, name: str, full: torch.Tensor, sbp_text: str, mesh: Mesh) -> list[Array]:
    sbp = parse_sbp(sbp_text, mesh)
    random = np.random.default_rng(stable_seed("pieces", case, name, show(sbp), mesh))
    return split(to_numpy(full), sbp, mesh, random)


def spread_of_pieces(case: str, name: str, full: torch.Tensor, sbp_text: str, mesh: Mesh) -> float:
    """The L2 norm of all ranks' pieces together over that of the tensor: by so much, rounding the pieces of a partial
    tensor weighs more than rounding the tensor itself."""
    norm = float(np.linalg.norm(to_numpy(full).astype(np.complex128)))
    pieces = _pieces(case, name, full, sbp_text, mesh)
    together = float(np.sqrt(sum(np.linalg.norm(piece.astype(np.complex128)) ** 2 for piece in pieces)))
    return together / norm if norm > 0 else 1.0
