"""Finds the step at which a failed trial goes wrong first, from a replay on all ranks.

No torch here: like the session, this runs in the process that the launcher started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sbp.culprit.layouts import distance, fitting_layout
from sbp.placement import (
    Array,
    LayoutError,
    Mesh,
    PlacementError,
    combine,
    local_shape,
    parse_mesh,
    parse_sbp,
)
from sbp.verdict.judge import Finding
from sbp.verdict.relation import describe_difference

# Of the reference's norm, as for the trial itself; and of the largest values of the run, for what all but cancels.
_LIMIT = 1e-10
_FLOOR = 1e-12
# So many results cross at a time.
_AT_ONCE = 32
FORWARD, BACKWARD = "forward", "backward"

# Asks all ranks; None where one does not answer.
Ask = Callable[[dict[str, Any]], list[Any] | None]


@dataclass(frozen=True)
class Culprit:
    """Where a trial goes wrong first.

    Attributes:
        direction: ``forward`` or ``backward``.
        module: the path of the module; kind: its class; both empty outside of modules.
        operator: the torch function; empty where all functions inside the module are right and its result is not.
        line: where it is called.
        rank: the first rank whose piece differs; claimed: the placement that it is held in.
        relation: how it differs, in words.
        origin: whether the step, run alone on the reference's inputs, is wrong as well; None where it cannot be run so.
    """

    direction: str
    module: str
    kind: str
    operator: str
    line: str
    rank: int = 0
    claimed: str | None = None
    relation: str = ""
    origin: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the results file has it; ``file`` and ``line`` apart."""
        file, _, line = self.line.rpartition(":")
        return {**asdict(self), "file": file, "line": int(line) if line.isdecimal() else None}

    def words(self) -> str:
        """One line for people."""
        where = f"{self.module} ({self.kind})" if self.module else self.kind
        if not self.operator:
            what = f"in the result of {where}"
        else:
            what = f"at {self.operator}" + (f" in {where}" if where else "")
        line = f", {self.line}" if self.line else ""
        claim = f", held as {self.claimed}" if self.claimed is not None else ""
        text = f"first differs {self.direction} {what}{line}: rank {self.rank}{claim}: {self.relation}"
        if self.origin is None:
            return text
        return text + (
            "; alone on the reference's inputs it is wrong as well: the origin"
            if self.origin
            else "; alone on the reference's inputs it is right"
        )


def find_culprit(ask: Ask, trial: Mapping[str, Any], mesh: Mesh, first: Finding) -> Culprit | None:
    """The step at which the trial goes wrong first; None where a replay shows none.

    Args:
        ask: sends a request to all ranks.
        trial: as plain data.
        mesh: the trial's.
        first: the trial's first finding, which is nearest to the cause.
    """
    answers = ask({"do": "replay", "trial": trial})
    if answers is None or "events" not in answers[0]:
        return None
    return _Search(ask, trial, mesh, first, answers).run()


class _Search:
    def __init__(
        self,
        ask: Ask,
        trial: Mapping[str, Any],
        mesh: Mesh,
        first: Finding,
        answers: Sequence[Mapping[str, Any]],
    ) -> None:
        self.ask = ask
        self.trial = trial
        self.mesh = mesh
        self.first = first
        own = answers[0]["own"]
        self.events: list[dict[str, Any]] = [
            {**event, **own.get(event["key"], {})} for event in answers[0]["events"]
        ]
        self.gradients = [f"{name}.grad" for name in answers[0]["gradients"]]
        self.observed: list[Mapping[str, Any]] = [answer["observed"] for answer in answers]
        self.largest = 0.0
        # name -> how it differs, None where it does not (or cannot be compared).
        self.judged: dict[str, Finding | None] = {}

    def run(self) -> Culprit | None:
        names = [name for event in self.events for name in event["outputs"]]
        for name, found in self._in_order(names):
            if found is None:
                continue
            event = next(event for event in self.events if name in event["outputs"])
            if self._is_mended(event):
                continue
            return self._alone(_culprit(FORWARD, event, found))
        return self._backward()

    def _backward(self) -> Culprit | None:
        for name, found in self._in_order(self.gradients):
            if found is not None:
                return self._consumer(name.removesuffix(".grad"), found)
        if self.first.quantity.partition(" of step ")[0].endswith(".grad"):
            of = self.first.quantity.partition(" of step ")[0].removesuffix(".grad")
            for name in (f"state {of}", f"in {of.removeprefix('input:')}"):
                culprit = self._consumer(name, self.first)
                if culprit is not None:
                    return culprit
        return None

    def _consumer(self, tensor: str, found: Finding) -> Culprit | None:
        """The step through which the wrong gradient of ``tensor`` came: one that has it as an argument and whose own
        results' gradients are right."""
        users = [event for event in self.events if tensor in event["inputs"] and event["operator"]]
        users = [
            event
            for event in users
            if all(self.judged.get(f"{name}.grad") is None for name in event["outputs"])
        ]
        tried = [self._alone(_culprit(BACKWARD, event, found), event["key"]) for event in users]
        return next((each for each in tried if each.origin), tried[0] if tried else None)

    def _is_mended(self, event: Mapping[str, Any]) -> bool:
        """Whether the difference stays inside a module whose result is right: parts of a hand-written module need not
        have counterparts."""
        call = event["key"].partition("|")[0]
        for outer in self.events:
            encloses = not outer["module"] or f"{event['module']}.".startswith(f"{outer['module']}.")
            same_call = outer["key"].partition("|")[0] == call
            if outer["operator"] or not encloses or not same_call or outer is event:
                continue
            compared = [name for name in outer["outputs"] if self._everywhere(name)]
            if compared and all(found is None for _, found in self._in_order(compared)):
                return True
        return False

    def _everywhere(self, name: str) -> bool:
        return all(name in seen for seen in self.observed)

    # ------------------------------------------------------------------------------------------ comparing

    def _in_order(self, names: Sequence[str]) -> Iterator[tuple[str, Finding | None]]:
        names = [name for name in names if self._everywhere(name)]
        for first in range(0, len(names), _AT_ONCE):
            portion = names[first : first + _AT_ONCE]
            missing = [name for name in portion if name not in self.judged]
            answers = self.ask({"do": "replayed", "names": missing}) if missing else []
            if answers is None:
                return
            for name in missing:
                pieces = [answer["pieces"].get(name) for answer in answers]
                self.judged[name] = self._judge(name, pieces, answers[0]["expected"].get(name))
            for name in portion:
                yield name, self.judged[name]

    def _judge(self, name: str, pieces: Sequence[Array | None], expected: Array | None) -> Finding | None:
        if expected is None or any(piece is None for piece in pieces):
            return None
        held = [piece for piece in pieces if piece is not None]
        finite = np.abs(expected[np.isfinite(expected)]) if expected.dtype.kind in "fc" else np.zeros(0)
        self.largest = max(self.largest, float(finite.max()) if finite.size else 0.0)
        limit = _LIMIT * float(np.linalg.norm(finite)) + _FLOOR * self.largest * float(np.sqrt(expected.size))
        claims = {seen[name]["claimed"] for seen in self.observed}
        if len(claims) > 1:
            return _difference(name, 0, None, "the ranks claim different placements")
        seen = self.observed[0][name]
        mesh = parse_mesh(seen["mesh"]) if seen["mesh"] else self.mesh
        claimed = seen["claimed"]
        if seen["problem"]:
            return None
        if claimed is None:
            return self._judge_plain(name, held, expected, mesh, limit)
        sbp = parse_sbp(claimed, mesh)
        try:
            shapes = [local_shape(expected.shape, sbp, mesh, rank) for rank in range(mesh.size)]
            if any(piece.shape != shape for piece, shape in zip(held, shapes, strict=True)):
                rank = next(rank for rank, piece in enumerate(held) if piece.shape != shapes[rank])
                words = (
                    f"its shape is {held[rank].shape}, {claimed} of {expected.shape} gives it {shapes[rank]}"
                )
                return _difference(name, rank, claimed, words)
            whole = combine(held, sbp, mesh, expected.shape)
        except LayoutError as error:
            return _difference(name, 0, claimed, str(error))
        except PlacementError:
            return None
        if distance(whole, expected) <= limit:
            return None
        return _difference(name, 0, claimed, describe_difference(held, expected, claimed, mesh))

    def _judge_plain(
        self, name: str, held: Sequence[Array], expected: Array, mesh: Mesh, limit: float
    ) -> Finding | None:
        # Where ranks average their gradients, each has that of its own part's mean.
        scales = [1.0]
        if name.endswith(".grad"):
            scales += [float(size) for size in {*mesh.shape, mesh.size} if size > 1]
        layout, possible = fitting_layout(held, expected, mesh, limit, scales)
        if layout is not None or not possible:
            return None
        return _difference(name, 0, None, "in no layout do the ranks' tensors make what one device has")

    # ---------------------------------------------------------------------------------------------- alone

    def _alone(self, culprit: Culprit, key: str = "") -> Culprit:
        """Whether the step is wrong by itself."""
        if not culprit.operator:
            return culprit
        if not key:
            key = next(
                event["key"]
                for event in self.events
                if (event["module"], event["operator"], event["line"])
                == (culprit.module, culprit.operator, culprit.line)
            )
        answers = self.ask({"do": "alone", "trial": self.trial, "key": key})
        if answers is None or any(answer is None for answer in answers):
            return culprit
        self.observed = [answer["observed"] for answer in answers]
        wrong = False
        for name, expected in answers[0]["expected"].items():
            if culprit.direction == FORWARD and name.endswith(".grad"):
                continue
            if self._everywhere(name):
                wrong = (
                    wrong
                    or self._judge(name, [answer["pieces"].get(name) for answer in answers], expected)
                    is not None
                )
        return replace(culprit, origin=wrong)


def _culprit(direction: str, event: Mapping[str, Any], found: Finding) -> Culprit:
    return Culprit(
        direction,
        event["module"],
        event["kind"],
        event["operator"],
        event["line"],
        found.rank,
        found.claimed,
        found.relation,
    )


def _difference(name: str, rank: int, claimed: str | None, relation: str) -> Finding:
    return Finding("wrong value", name, rank, (rank,), claimed, relation=relation)
