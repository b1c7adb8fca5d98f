"""Finds out by experiment which SBP signatures are true for an operator, from the single-device operator alone.

A signature says: with inputs that lie so, the operator run by every rank on its own pieces gives pieces that make up
the true result, lying so. It is *true* when that holds for all values, all ways to draw partial pieces and all sizes;
here it counts as true when no experiment has refuted it. How experiments are made such that a false one does not
survive, and which conditions a true one may carry, is told in docs/signatures.md.

One mesh axis is enough: axes compose, since what holds for whole tensors of any size holds for the pieces of another
axis as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sbp.oracle.calls import Call, results, show_tensor
from sbp.oracle.experiment import (
    Combination,
    Experiment,
    Right,
    Run,
    candidates,
    local_shape,
    to_array,
    unevenness,
)
from sbp.oracle.pieces import PARTIALS, choices, settle
from sbp.placement import Placement
from sbp.trial import stable_seed

EVEN, NONEMPTY, FINITE, LOCAL_SIZES = "even", "nonempty", "finite", "local sizes"
"""What a signature may need: splits that come out even; no rank with an empty piece; no NaN and no infinity; the
operator's size arguments replaced by each rank's own."""

MESHES = (2, 3, 4)
# For each output a set of its placements, as bits.
Masks = tuple[int, ...]

# More combinations of inputs than this are not all tried.
MOST_COMBINATIONS = 4_000
# What does not depend on most of its inputs is true for nearly all their placements: of those with P(avg), P(max)
# and P(min) no more than these are tried, and more than that are confirmed less often.
_MOST_ALIKE = 1_000
# No more signatures of a call are listed, where those with inputs whose values do not matter are many.
_MOST_SIGNATURES = 20_000
# Results of few different values agree by chance now and then, so they are confirmed by so many times more draws.
_DRAWS_OF_A_WEAK_RESULT = 6
_FEW_VALUES = 8
_FEW_ELEMENTS = 4


class CannotJudge(Exception):
    """No signature of this call can be found by experiment; says why."""


@dataclass(frozen=True, order=True)
class Signature:
    """``inputs -> placement`` of one output.

    Attributes:
        inputs: the placement of each input tensor, as text.
        output: which output.
        placement: that output's.
        needs: conditions under which it is true, a subset of EVEN, NONEMPTY, FINITE and LOCAL_SIZES.
    """

    inputs: tuple[str, ...]
    output: int
    placement: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" [{self.output}]" if self.output else ""
        needs = f"  ({', '.join(self.needs)})" if self.needs else ""
        return f"{', '.join(self.inputs)} ->{where} {self.placement}{needs}"


@dataclass(frozen=True)
class Tested:
    """What a survivor has survived: draws with inputs of these shapes on a mesh of so many ranks."""

    shapes: tuple[tuple[int, ...], ...]
    mesh: int
    draws: int


@dataclass(frozen=True)
class Findings:
    """The signatures of one call.

    Attributes:
        call: as text.
        inputs, outputs: the tensors, as text.
        signatures: those that no experiment refuted, the trivial one (all B) among them.
        tested: the experiments.
        how: ``all`` combinations of input placements, or which of them.
        judged: combinations of input placements and a placement of one output that were judged.
        ran: calls of the local operator that it took.
    """

    call: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signatures: tuple[Signature, ...]
    tested: tuple[Tested, ...]
    how: str = "all"
    judged: int = 0
    ran: int = 0

    @property
    def draws(self) -> int:
        return sum(tested.draws for tested in self.tested)


@dataclass
class Sample:
    """One set of values for a call, with the single-device results.

    ``kind`` is ``plain``; ``negated``, ``zeros``, ``one zero``, ``mostly zeros``; or ``special`` (NaN and infinities).
    """

    call: Call
    outputs: list[torch.Tensor]
    kind: str = "plain"
    number: int = 0
    cases: dict[int, list[list[int]]] = field(default_factory=dict)
    outputs_by_class: dict[int, list[Masks]] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(tensor.shape) for tensor in self.call.tensors)


def find_signatures(
    variants: Sequence[Call],
    meshes: Sequence[int] = MESHES,
    seed: str = "",
    limit: int = MOST_COMBINATIONS,
    partials: Sequence[str] = PARTIALS,
) -> Findings:
    """The true signatures of a call.

    Args:
        variants: the call with different sizes and values. All have the structure of the first one, whose sizes
            should divide evenly on the meshes; those that have not are left out.
        meshes: numbers of ranks.
        seed: of the partial pieces.
        limit: how many combinations of input placements may be tried.
        partials: the partial placements that inputs are tried with.

    Raises CannotJudge where there is nothing to compare: random or uninitialised results, no tensors, an error.
    """
    samples = usable_samples(variants)
    search = _Search(samples, meshes, seed, limit, partials)
    with torch.no_grad():
        return search.find()


def usable_samples(variants: Sequence[Call]) -> list[Sample]:
    """The variants with their results, settled so that partial pieces add up exactly. Raises CannotJudge."""
    samples: list[Sample] = []
    for call in variants:
        try:
            sample = _prepare(call)
        except CannotJudge:
            if not samples:
                raise
            continue
        if samples and not _same_structure(samples[0], sample):
            continue
        samples.append(replace(sample, number=len(samples)))
    return samples


def _same_structure(one: Sample, other: Sample) -> bool:
    outputs = [[(o.ndim, o.dtype) for o in sample.outputs] for sample in (one, other)]
    return one.call.structure == other.call.structure and outputs[0] == outputs[1]


def _prepare(call: Call) -> Sample:
    """Raises CannotJudge."""
    if not call.tensors:
        raise CannotJudge("no tensor among the arguments")
    for tensor in call.tensors:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise CannotJudge("an argument is not a plain strided tensor")
    call = call.with_tensors([settle(tensor) for tensor in call.tensors])
    before = [tensor.clone() for tensor in call.tensors]
    first, again = _results(call, 1), _results(call, 2)
    if not first:
        raise CannotJudge("no tensor among the results")
    if any(output.layout != torch.strided for output in first):
        raise CannotJudge("a result is not a plain strided tensor")
    for one, other in zip(before, call.tensors):
        if not _equal(one, other):
            raise CannotJudge("it writes to its arguments")
    if any(not _equal(one, other) for one, other in zip(first, again, strict=True)):
        raise CannotJudge("random: two runs differ")
    if _is_uninitialised(call, first):
        raise CannotJudge("the result is uninitialised memory")
    if all(output.numel() == 0 for output in first):
        raise CannotJudge("every result is empty")
    return Sample(call, [output.clone() for output in first])


def _results(call: Call, seed: int) -> list[torch.Tensor]:
    # torch.manual_seed would ask every kind of device whether it is there, a thousand times here.
    torch.default_generator.manual_seed(seed)
    try:
        with torch.no_grad():
            return results(call.run(call.tensors))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise CannotJudge(f"the operator itself raises {type(error).__name__}: {line[:200]}") from error


def _is_uninitialised(call: Call, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether results change when fresh memory is filled with NaN first."""
    inexact = [output for output in outputs if output.is_floating_point() or output.is_complex()]
    if not inexact:
        return False
    sevens = [torch.full_like(output, 7.0) for output in inexact]
    del sevens  # what is allocated next lies where they lay, unless the operator fills it
    plain = _results(call, 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        filled = _results(call, 1)
    except CannotJudge:
        return False
    finally:
        torch.use_deterministic_algorithms(False)
    return any(
        bool((torch.isnan(new) & ~torch.isnan(old)).any())
        for new, old in zip(filled, plain)
        if (old.is_floating_point() or old.is_complex()) and new.shape == old.shape
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.itemsize == 1 and one.is_floating_point():
        one, other = one.float(), other.float()
    elif one.dtype == torch.complex32:  # has no comparison
        one, other = one.to(torch.complex64), other.to(torch.complex64)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


# ------------------------------------------------------------------------------------------ the search


class _State:
    """What is known of one combination of input placements.

    ``seen[which]`` are, for each output, the placements that experiments of that class have judged, ``held[which]``
    those that were right in all of them; ``bound`` are those that may be true at all.
    """

    def __init__(self, outputs: int, which: int) -> None:
        self.which = which
        self.seen: list[Masks] = [(0,) * outputs for _ in range(4)]
        self.held: list[Masks] = [(-1,) * outputs for _ in range(4)]
        self.bound: Masks = (-1,) * outputs

    def update(self, which: int, right: Right, judged: Masks) -> None:
        """Note what was right in an experiment of class ``which``, of what it judged."""
        now = right if right is not None else (0,) * len(judged)
        self.seen[which] = tuple(a | b for a, b in zip(self.seen[which], judged))
        self.held[which] = tuple(a & (b | ~c) for a, b, c in zip(self.held[which], now, judged))

    def alive(self) -> Masks:
        """The placements that may still be true, under some condition."""
        found = []
        for output, bound in enumerate(self.bound):
            mask, open_bits = 0, -1
            for which in range(3):
                seen = self.seen[which][output] & open_bits
                mask |= seen & self.held[which][output]
                open_bits &= ~seen
            found.append(mask & bound)
        return tuple(found)


# The classes of experiments, by how the splits come out; the last one is of values, not of splits.
_EVEN, _UNEVEN, _EMPTY, _SPECIAL = range(4)


class _Search:
    def __init__(
        self, samples: list[Sample], meshes: Sequence[int], seed: str, limit: int, partials: Sequence[str]
    ) -> None:
        self.samples = samples
        self.meshes = meshes
        self.seed = seed
        self.limit = limit
        first = samples[0]
        self.placements = [candidates(output) for output in first.outputs]
        self.tested: dict[tuple[Any, int], int] = {}
        self.ran = 0
        # Whether P(avg), P(max) and P(min) were tried on few inputs at once only.
        self.cut_short = False
        self._kept: dict[tuple[int, int], Experiment] = {}
        # The partial placements of inputs whose values no result depends on; of the others, those are tried.
        self.indifferent: dict[int, list[Placement]] = {}
        self._arrange([choices(tensor, partials) for tensor in first.call.tensors])

    def _arrange(self, choices: list[list[Placement]]) -> None:
        """Set which placements of the inputs are tried."""
        self.choices = choices
        # Placements that equal pieces on all ranks would also be pieces of.
        self.idempotent = [
            [k for k, p in enumerate(some) if p.is_partial and p.reduction in ("avg", "max", "min")]
            for some in self.choices
        ]
        self.basic = [
            [k for k in range(len(some)) if k not in idempotent]
            for some, idempotent in zip(self.choices, self.idempotent)
        ]
        self.partial = [
            [k for k in basic if some[k].is_partial] for some, basic in zip(self.choices, self.basic)
        ]

    def find(self) -> Findings:
        self._set_indifferent_aside()
        combinations, how = basic_combinations(self.basic, self.choices, self.limit)
        signatures = list(self._explore(combinations, None))
        for placement in self._local_size_placements():
            known = {s.inputs for s in signatures if s.output == 0 and s.placement == str(placement)}
            signatures += self._explore(combinations, placement, known)
        if self.cut_short:
            how += "; P(avg), P(max), P(min) on few inputs at once only"
        first = self.samples[0]
        counted = (
            combinations if how != "all" else list(itertools.product(*map(range, map(len, self.choices))))
        )
        inputs = sum(
            int(np.prod([1 + len(some) for place, some in self.indifferent.items() if c[place] == 0]))
            for c in counted
        )
        signatures, whole = self._with_indifferent(signatures)
        if not whole:
            how += "; P of inputs whose values do not matter on few of them at once only"
        return Findings(
            str(first.call),
            tuple(map(show_tensor, first.call.tensors)),
            tuple(map(show_tensor, first.outputs)),
            tuple(sorted(set(signatures))),
            tuple(Tested(shapes, mesh, draws) for (shapes, mesh), draws in self.tested.items()),
            how,
            inputs * sum(map(len, self.placements)),
            self.ran,
        )

    # ------------------------------------------------------------------- inputs whose values do not matter

    @cached_property
    def extra(self) -> list[Sample]:
        """The first sample with other values."""
        return list(sprinkled(self.samples[0], self.seed))

    def _set_indifferent_aside(self) -> None:
        """Find the inputs that give their shape alone to the results (the operands of a sum, to its gradient): with
        partial pieces in the place of their values each rank has the same results, bit by bit, in all experiments.
        Partial placements of these are true where B is, which needs no further trying."""
        for place, some in enumerate(self.choices):
            partial = [k for k, placement in enumerate(some) if placement.is_partial]
            experiments = itertools.product((*self.samples, *self.extra), self.meshes)
            if partial and all(self._does_not_matter(place, partial, *one) for one in experiments):
                self.indifferent[place] = [some[k] for k in partial]
        if self.indifferent:
            self._kept.clear()
            self._arrange(
                [
                    [
                        placement
                        for placement in some
                        if not (place in self.indifferent and placement.is_partial)
                    ]
                    for place, some in enumerate(self.choices)
                ]
            )

    def _does_not_matter(self, place: int, partial: Sequence[int], sample: Sample, mesh: int) -> bool:
        """Whether the results with an input's partial pieces are those with its values."""
        experiment = self._experiment(sample, mesh, 0)
        tensors = list(sample.call.tensors)
        for piece in itertools.chain.from_iterable(experiment.pieces(place, k) for k in partial):
            tensors[place] = piece
            self.ran += 1
            try:
                found = results(sample.call.run(tensors))
            except Exception:
                return False
            if len(found) != len(sample.outputs) or not all(map(_equal, found, sample.outputs)):
                return False
        return True

    def _with_indifferent(self, signatures: Iterable[Signature]) -> tuple[list[Signature], bool]:
        """Signatures together with those that have partial placements of indifferent inputs in place of B: on all of
        these inputs where that is not too many, else on few at once. Returns them, and whether these are all."""
        found = list(signatures)
        level = [(one, -1) for one in found]
        while level:
            wider = [
                (replace(one, inputs=(*one.inputs[:place], str(p), *one.inputs[place + 1 :])), place)
                for one, last in level
                for place, some in self.indifferent.items()
                if place > last and one.inputs[place] == "B"
                for p in some
            ]
            if len(found) + len(wider) > max(_MOST_SIGNATURES, len(found)):
                return found, False
            found += [one for one, _ in wider]
            level = wider
        return found, True

    # -------------------------------------------------------------------------- one way to call it

    def _explore(
        self,
        combinations: Sequence[Combination],
        local: Placement | None,
        known: Iterable[tuple[str, ...]] = (),
    ) -> Iterator[Signature]:
        """The signatures of the call as it is, or with its sizes made the ranks' own for an output that is split as
        ``local`` says; ``known`` are true without that."""
        states: dict[Combination, _State] = {}
        self._screen(combinations, states, local)
        self._add_idempotent(states, local)
        skip = set(known)
        alive = {
            combination: state
            for combination, state in states.items()
            if any(state.alive()) and self._words(combination) not in skip
        }
        self._confirm(alive, local)
        for combination, state in alive.items():
            for output, placements in enumerate(self.placements):
                for bit, placement in enumerate(placements):
                    needs = _needs(state, output, bit)
                    if needs is None or (local is not None and placement != local):
                        continue
                    if local is not None:
                        needs = (*needs, LOCAL_SIZES)
                    yield Signature(self._words(combination), output, str(placement), needs)

    def _words(self, combination: Combination) -> tuple[str, ...]:
        return tuple(str(some[k]) for some, k in zip(self.choices, combination))

    def _screen(
        self, combinations: Sequence[Combination], states: dict[Combination, _State], local: Placement | None
    ) -> None:
        """One experiment for every combination of B, S and P, if it can be one whose splits are even: most
        signatures are false and end here."""
        left = list(combinations)
        for wanted in (_EVEN, _UNEVEN, _EMPTY):
            for sample, mesh in itertools.product(self.samples[:2], self.meshes):
                cases = self._unevenness(sample, mesh)
                now = [c for c in left if max(cases[i][k] for i, k in enumerate(c)) == wanted]
                if not now:
                    continue
                chosen = set(now)
                left = [c for c in left if c not in chosen]
                # Where B raises, P does: with one rank holding all and the others zeros, that rank has B's piece.
                whole = [c for c in now if not any(k in self.partial[i] for i, k in enumerate(c))]
                raised = self._evaluate(sample, mesh, 0, whole, states, wanted, local)
                rest = []
                for c in now:
                    like = tuple(0 if k in self.partial[i] else k for i, k in enumerate(c))
                    if like == c:
                        continue
                    if like in raised:
                        states[c] = _State(len(self.placements), wanted)
                        self._note(states[c], wanted, None, sample, mesh)
                    else:
                        rest.append(c)
                self._evaluate(sample, mesh, 0, rest, states, wanted, local)
            if not left:
                return

    def _add_idempotent(self, states: dict[Combination, _State], local: Placement | None) -> None:
        """P(avg), P(max) and P(min) in place of B, one input after the other. Equal pieces on all ranks are pieces
        of these as well, so what is false of B is false of them."""
        pairs = [(place, k) for place, some in enumerate(self.idempotent) for k in some]
        by_place: dict[int, list[int]] = {}
        for place, k in pairs:
            by_place.setdefault(place, []).append(k)
        level = [c for c, state in states.items() if any(state.alive())]
        last = dict.fromkeys(level, -1)
        while level:
            children: dict[int, list[Combination]] = {}
            bound: dict[Combination, tuple[int, ...]] = {}
            for parent in level:
                for place, some in by_place.items():
                    if place <= last[parent] or parent[place] != 0:
                        continue
                    for k in some:
                        child = (*parent[:place], k, *parent[place + 1 :])
                        mask = self._parents_mask(child, states)
                        if any(mask):
                            bound[child] = mask
                            last[child] = place
                            children.setdefault(states[parent].which, []).append(child)
            level = []
            if len(last) > _MOST_ALIKE:
                self.cut_short = True
                return
            for which, some_children in children.items():
                for sample, mesh, mine in self._spread(some_children, which):
                    self._evaluate(sample, mesh, 0, mine, states, which, local)
                for child in some_children:
                    state = states[child]
                    state.bound = bound[child]
                    if any(state.alive()):
                        level.append(child)

    def _parents_mask(self, child: Combination, states: dict[Combination, _State]) -> tuple[int, ...]:
        """What is still possible for all combinations with one of the idempotent placements turned back into B."""
        outputs = len(self.placements)
        mask: tuple[int, ...] = (-1,) * outputs
        for place, k in enumerate(child):
            if k in self.idempotent[place]:
                parent = states.get((*child[:place], 0, *child[place + 1 :]))
                alive = parent.alive() if parent is not None else (0,) * outputs
                mask = tuple(a & b for a, b in zip(mask, alive))
        return mask

    def _spread(
        self, combinations: Sequence[Combination], which: int
    ) -> Iterator[tuple[Sample, int, list[Combination]]]:
        """Each combination with a sample and mesh on which its splits come out as wanted."""
        left = list(combinations)
        for sample, mesh in itertools.product(self.samples[:2], self.meshes):
            cases = self._unevenness(sample, mesh)
            now = [c for c in left if max(cases[i][k] for i, k in enumerate(c)) == which]
            if now:
                chosen = set(now)
                left = [c for c in left if c not in chosen]
                yield sample, mesh, now

    def _confirm(self, alive: dict[Combination, _State], local: Placement | None) -> None:
        """Further experiments with those that are left: other values, sizes, meshes and partial pieces."""
        weak = any(_is_weak(output) for output in self.samples[0].outputs)
        draws = _DRAWS_OF_A_WEAK_RESULT if weak and len(alive) <= _MOST_ALIKE else 1
        plan = [(sample, mesh) for sample in self.samples for mesh in self.meshes]
        plan += [(sample, mesh) for sample in self.extra for mesh in self.meshes[:2]]
        for sample, mesh in plan:
            for draw in range(1, draws + 1):
                now = [c for c, state in alive.items() if any(state.alive())]
                if not now:
                    return
                cases = self._unevenness(sample, mesh)
                groups: dict[int, list[Combination]] = {}
                for c in now:
                    which = max(cases[i][k] for i, k in enumerate(c))
                    if sample.kind == "special":
                        # What fails because of how the splits come out says nothing of the values.
                        if which != _EVEN and any(alive[c].seen[_EVEN]):
                            continue
                        which = _SPECIAL
                    groups.setdefault(which, []).append(c)
                for which, mine in groups.items():
                    self._evaluate(sample, mesh, draw, mine, alive, which, local)
                key = sample.shapes, mesh
                self.tested[key] = self.tested.get(key, 0) + 1

    def _evaluate(
        self,
        sample: Sample,
        mesh: int,
        draw: int,
        combinations: Sequence[Combination],
        states: dict[Combination, _State],
        which: int,
        local: Placement | None,
    ) -> set[Combination]:
        """Judge the combinations and note what was found; returns those that raised."""
        if not combinations:
            return set()
        experiment = self._experiment(sample, mesh, draw)
        run = None if local is None else _local_runs(sample, mesh, local)
        found = experiment.evaluate(combinations, run)
        self.ran += len(combinations) * experiment.parts
        raised = set()
        for combination, right in zip(combinations, found):
            state = states.get(combination)
            if state is None:
                state = states[combination] = _State(len(self.placements), which)
            self._note(state, which, right, sample, mesh)
            if right is None:
                raised.add(combination)
        return raised

    def _note(self, state: _State, which: int, right: Right, sample: Sample, mesh: int) -> None:
        """Where the inputs' splits are even, an output's may still be uneven: that is judged as such."""
        if which == _SPECIAL:
            state.update(which, right, tuple((1 << len(some)) - 1 for some in self.placements))
            return
        for output_class, judged in enumerate(self._output_classes(sample, mesh)):
            if any(judged):
                state.update(max(which, output_class), right, judged)

    def _output_classes(self, sample: Sample, mesh: int) -> list[Masks]:
        """For each class the output placements whose splits come out so."""
        if mesh not in sample.outputs_by_class:
            by_class = []
            for which in range(3):
                masks = []
                for output, some in zip(sample.outputs, self.placements):
                    bits = [unevenness(output.shape, placement, mesh) == which for placement in some]
                    masks.append(sum(1 << bit for bit, yes in enumerate(bits) if yes))
                by_class.append(tuple(masks))
            sample.outputs_by_class[mesh] = by_class
        return sample.outputs_by_class[mesh]

    def _experiment(self, sample: Sample, mesh: int, draw: int) -> Experiment:
        """The experiment with those pieces. Those of draw 0 serve several times and are kept."""
        key = id(sample), mesh
        if draw == 0 and key in self._kept:
            return self._kept[key]
        seed = stable_seed("signatures", self.seed, sample.kind, sample.number, sample.shapes, mesh, draw)
        experiment = Experiment(
            sample.call.run,
            sample.call.tensors,
            self.choices,
            sample.outputs,
            self.placements,
            mesh,
            np.random.default_rng(seed),
        )
        if draw == 0:
            self._kept[key] = experiment
        return experiment

    def _unevenness(self, sample: Sample, mesh: int) -> list[list[int]]:
        if mesh not in sample.cases:
            sample.cases[mesh] = self._experiment(sample, mesh, 0).unevenness
        return sample.cases[mesh]

    # ----------------------------------------------------------------------------- sizes as arguments

    def _local_size_placements(self) -> list[Placement]:
        """The splits of the output that the call could be told the local sizes of."""
        if len(self.placements) != 1:
            return []
        if any(not has_size_argument(sample.call, sample.outputs[0].shape) for sample in self.samples):
            return []
        return [placement for placement in self.placements[0] if placement.is_split]


def _local_runs(sample: Sample, mesh: int, local: Placement) -> list[Run]:
    """How each rank calls the operator with the sizes of its own piece of the output."""
    whole = tuple(sample.outputs[0].shape)
    return [with_sizes(sample.call, whole, local_shape(whole, local, mesh, rank)).run for rank in range(mesh)]


def _needs(state: _State, output: int, bit: int) -> tuple[str, ...] | None:
    """The conditions under which a signature held, None where it was refuted."""

    def held(which: int) -> bool | None:
        if not state.seen[which][output] >> bit & 1:
            return None
        return bool(state.held[which][output] >> bit & 1)

    if not state.bound[output] >> bit & 1:
        return None
    even, uneven, empty = held(_EVEN), held(_UNEVEN), held(_EMPTY)
    if even is False or (even is None and uneven is False) or (even is None and uneven is None and not empty):
        return None
    needs: list[str] = []
    if uneven is False:
        needs.append(EVEN)
    elif empty is False:
        needs.append(NONEMPTY)
    if held(_SPECIAL) is False:
        needs.append(FINITE)
    return tuple(needs)


def _is_weak(output: torch.Tensor) -> bool:
    """Whether a wrong result may well equal this one by chance: it has few different values that repeat, or whole
    numbers, or next to no elements. Some elements that are all different do not come out right again and again."""
    if not (output.is_floating_point() or output.is_complex()):
        return True
    if output.dtype.itemsize == 1:
        return True
    values = to_array(output)
    different = int(np.unique(values).size)
    if different >= _FEW_VALUES or values.size < _FEW_ELEMENTS:
        return different < _FEW_VALUES
    parts = np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values
    with np.errstate(invalid="ignore"):
        return different < values.size or bool(
            np.any(parts == np.round(parts)) or not np.isfinite(parts).all()
        )


def basic_combinations(
    basic: Sequence[Sequence[int]], placements: Sequence[Sequence[Placement]], limit: int
) -> tuple[list[Combination], str]:
    """All combinations of choices where these are not too many; else those with few inputs off B, and those in
    which all inputs lie alike.

    Returns: the combinations, fewest off B first, and which they are, in words.
    """
    total = float(np.prod([len(some) for some in basic], dtype=np.float64))
    if total <= limit:
        every = list(itertools.product(*basic))
        return every, "all"
    count = len(basic)
    found: dict[Combination, None] = {}
    most = 0
    for off in range(count + 1):
        layer = list(itertools.islice(_with_off(basic, off), limit - len(found) + 1))
        if len(found) + len(layer) > limit:
            break
        found.update(dict.fromkeys(layer))
        most = off
    words = {str(p) for some in placements for p in some}
    for word in sorted(words):
        alike = tuple(
            next((k for k in mine if str(some[k]) == word), 0) for mine, some in zip(basic, placements)
        )
        found[alike] = None
    return list(found), f"at most {most} of {count} inputs off B, and all alike"


def _with_off(basic: Sequence[Sequence[int]], off: int) -> Iterator[Combination]:
    """Combinations with exactly ``off`` inputs that are not B."""
    for places in itertools.combinations(range(len(basic)), off):
        others = [[k for k in basic[place] if k] for place in places]
        for chosen in itertools.product(*others):
            row = [0] * len(basic)
            for place, k in zip(places, chosen):
                row[place] = k
            yield tuple(row)


# --------------------------------------------------------------------------------------- other values


def sprinkled(sample: Sample, seed: str) -> Iterator[Sample]:
    """The sample with zeros, and with NaN and infinities, among its values, where the operator takes these. Tests
    for zero, for equality or for NaN answer the same everywhere without them."""
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in sample.call.tensors):
        return
    random = np.random.default_rng(stable_seed("sprinkle", seed, sample.shapes))
    weak = any(_is_weak(output) for output in sample.outputs)
    kinds = ("negated", "zeros", "special", *(("one zero", "mostly zeros") if weak else ()))
    for kind in kinds:
        tensors = [_sprinkle(tensor, kind, random, weak) for tensor in sample.call.tensors]
        try:
            changed = _prepare(sample.call.with_tensors(tensors))
        except CannotJudge:
            continue
        if kind != "special" and _more_nan(changed, sample):
            continue  # outside of what the operator is defined for
        if _same_structure(sample, changed) and [o.shape for o in changed.outputs] == [
            o.shape for o in sample.outputs
        ]:
            yield replace(changed, kind=kind)


def _more_nan(one: Sample, other: Sample) -> bool:
    counts = [sum(int((output != output).sum()) for output in sample.outputs) for sample in (one, other)]
    return counts[0] > counts[1]


def _sprinkle(tensor: torch.Tensor, kind: str, random: np.random.Generator, infinite: bool) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return tensor
    tensor = tensor.clone()
    flat = tensor.view(-1)
    somewhere = int(random.integers(0, flat.shape[0]))
    if kind == "negated":
        return -tensor
    if kind == "zeros":
        flat[torch.from_numpy(random.random(flat.shape[0]) < 0.35)] = 0
    elif kind == "one zero":
        flat[somewhere] = 0
    elif kind == "mostly zeros":
        flat[torch.arange(flat.shape[0]) != somewhere] = 0
    elif flat.shape[0] > 1:  # something has to be left to compare
        flat[somewhere] = float("nan")
        # Products of partial pieces with infinity have no sum, which says nothing new; tests for infinity need one.
        if infinite:
            flat[int(random.integers(0, flat.shape[0]))] = float("inf")
    return tensor


# -------------------------------------------------------------------------------- sizes as arguments


def has_size_argument(call: Call, shape: Sequence[int]) -> bool:
    """Whether an argument, or several numbers at the end of the positional ones, spell the result's shape."""
    return _replace_sizes(call, tuple(shape), tuple(shape))[1]


def with_sizes(call: Call, shape: tuple[int, ...], local: tuple[int, ...]) -> Call:
    """The call with ``local`` in place of every argument that spells the result's ``shape``; a -1 in it stands for
    what is left, as in reshape."""
    return _replace_sizes(call, shape, local)[0]


def _replace_sizes(call: Call, shape: tuple[int, ...], local: tuple[int, ...]) -> tuple[Call, bool]:
    found = False

    def exchange(value: Any) -> Any:
        nonlocal found
        sizes = isinstance(value, (tuple, list)) and value and all(type(item) is int for item in value)
        if sizes and _spells(value, shape):
            found = True
            return torch.Size(local) if isinstance(value, torch.Size) else type(value)(local)
        return value

    args = tuple(exchange(value) for value in call.args)
    kwargs = {name: exchange(value) for name, value in call.kwargs.items()}
    if not found and shape:
        # Tensor.view(x, 2, 3), Tensor.expand(x, 2, 3): the numbers one by one.
        tail = args[-len(shape) :]
        if len(tail) == len(shape) and all(type(item) is int for item in tail) and _spells(tail, shape):
            found = True
            args = (*args[: -len(shape)], *local)
    return replace(call, args=args, kwargs=kwargs), found


def _spells(value: Sequence[int], shape: tuple[int, ...]) -> bool:
    if len(value) != len(shape) or list(value).count(-1) > 1:
        return False
    return all(item in (-1, size) for item, size in zip(value, shape))
