"""Cases and trials: what is checked, named so that the same command always means the same trials.

A *case* is a thing to check (a module with its inputs); a *trial* is a case under one choice of placements,
mesh, dtype and device, and is what gets a verdict. Trials are plain data that cross process borders, so this
module needs neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DEFAULT_DTYPE = "float64"
DEFAULT_DEVICE = "cpu"


@dataclass(frozen=True)
class Trial:
    """One case under one choice of placements.

    Attributes:
        suite, case: where the case comes from and its name there.
        mesh: the mesh as text, ``4`` or ``2x2``.
        placements: tensor name -> SBP as text, for the tensors that are not B on every axis.
        kind: what is run: ``forward`` (and backward where there is a gradient), or ``train`` (optimizer steps).
        options: what else the suite needs to know, as plain data, such as ``{"optimizer": "SGD"}``; part of
            the id.
        dtype, device: of the floating tensors.
        subject: the system under test; not part of the id, so that subjects can be compared trial by trial.
    """

    suite: str
    case: str
    mesh: str
    placements: Mapping[str, str] = field(default_factory=dict)
    kind: str = "forward"
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = DEFAULT_DTYPE
    device: str = DEFAULT_DEVICE
    subject: str = "dtensor"

    def on_one_device(self) -> Trial:
        """The same without any distribution: each rank alone, so that ranks which did not agree on a seed do not
        matter."""
        options = {name: value for name, value in self.options.items() if name != "unseeded"}
        return replace(self, placements={}, options={**options, "mode": "local"})

    @property
    def id(self) -> str:
        """The stable name, such as ``modules/Linear-0/4/input=S(0),weight=P``.

        Read from left to right: suite, case, mesh, placements, then whatever is not the default.
        """
        placed = ",".join(f"{name}={sbp}".replace(" ", "") for name, sbp in self.placements.items())
        parts = [self.suite, self.case, self.mesh, placed or "all=B"]
        if self.kind != "forward":
            parts.append(self.kind)
        parts += [f"{name}={value}" for name, value in sorted(self.options.items())]
        parts += [word for word in (self.dtype, self.device) if word not in (DEFAULT_DTYPE, DEFAULT_DEVICE)]
        return "/".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a message or a file."""
        return {
            "suite": self.suite,
            "case": self.case,
            "mesh": self.mesh,
            "placements": dict(self.placements),
            "kind": self.kind,
            "options": dict(self.options),
            "dtype": self.dtype,
            "device": self.device,
            "subject": self.subject,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Trial:
        """The inverse of :meth:`to_dict`; unknown keys are left out."""
        names = Trial.__dataclass_fields__
        return Trial(**{name: value for name, value in data.items() if name in names})


def stable_seed(*words: object) -> int:
    """A seed of 63 bits that depends on the words alone: not on the process, its hash seed or the machine."""
    text = "\x1f".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
