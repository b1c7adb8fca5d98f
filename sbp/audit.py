"""Compares what a subject's sharding rules claim with what is true, operator by operator and without ranks.

A rule is judged on the very call that it was asked about: the inputs are cut as the rule wants them, every rank's
local operator is run in this process, and the results have to make up the single-device result under the placements
that the rule claims. So each unsound rule comes with an input on which it fails. What a rule leaves out is told by the
true signatures (:mod:`sbp.oracle.signatures`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sbp.audit_dtensor import Claim, Refused, Unknown, ask, dispatched, why_not
from sbp.oracle.calls import Call
from sbp.oracle.experiment import Experiment, candidates, unevenness
from sbp.oracle.pieces import PARTIALS, choices
from sbp.oracle.signatures import LOCAL_SIZES, CannotJudge, Sample, find_signatures, usable_samples
from sbp.placement import B, Placement
from sbp.trial import stable_seed

# Sample calls of an operator, and ATen operators of one such call, that are looked at.
SAMPLES = 4
_MOST_DISPATCHED = 12
# Above so many combinations of input placements those with P(avg), P(max), P(min) are left out, then those in which
# more than two inputs are off B.
_MOST_COMBINATIONS = 150
# How many calls with an operand cut to half.
_MOST_NARROWED = 4
_MESHES = (2, 3, 4)

Lie = tuple[Placement, ...]


@dataclass(frozen=True)
class Traffic:
    """Collectives that put inputs from one placement into another, and the bytes that each rank receives."""

    collectives: int
    received: int


def traffic(tensors: Sequence[torch.Tensor], before: Lie, after: Lie, parts: int) -> Traffic:
    """What moving the inputs costs on a mesh of one axis, by ring algorithms: all-gather and reduce-scatter receive
    ``(n - 1) / n`` of the tensor, all-reduce twice that, all-to-all ``(n - 1) / n`` of the own piece. Leaving B costs
    nothing."""
    collectives = received = 0
    for tensor, old, new in zip(tensors, before, after, strict=True):
        size = tensor.numel() * tensor.element_size() * (parts - 1) / parts
        if old in (new, B):
            continue
        collectives += 1
        if old.is_split and new.is_split:
            size /= parts
        elif old.is_partial and not new.is_split:
            size *= 2
        received += round(size)
    return Traffic(collectives, received)


def audit_operator(name: str, samples: int = SAMPLES) -> dict[str, Any]:
    """What DTensor's rules do wrong and leave out for one operator of the database, as ``sbp audit --json`` has it.
    Raises KeyError where there is no such operator."""
    from sbp.suites.operator_database import find_operator

    operator = find_operator(name)
    short = name.rpartition(".")[0] or name if name.count(".") == 1 else name
    calls: list[list[Call]] = []
    for kind in operator.variants(samples):
        calls.append([Call(short, operator.function, one.args, one.kwargs) for one in kind])
        if operator.inplace is not None:
            calls.append([Call(f"{short}_", operator.inplace, one.args, one.kwargs, (0,)) for one in kind])
    return audit_calls(calls, name)


def audit_calls(calls: Sequence[Sequence[Call]], seed: str) -> dict[str, Any]:
    """The same for calls that are given, each with its variants in other sizes and values."""
    entry: dict[str, Any] = {
        "unsound": [],
        "missing": [],
        "judged": 0,
        "refused": 0,
        "rules": [],
        "left out": [],
    }
    seen: set[str] = set()
    found: set[tuple[str, ...]] = set()
    for variants in calls:
        try:
            units = list(_units(variants))
        except Exception as error:
            entry["left out"].append([str(variants[0]), f"it does not run: {error}".splitlines()[0][:200]])
            continue
        for unit in units:
            key = f"{unit[0].structure} {[tuple(t.shape) for t in unit[0].tensors]} {unit[0]}"
            if key in seen:
                continue
            seen.add(key)
            reason = why_not(unit[0])
            try:
                if reason:
                    raise CannotJudge(reason)
                _audit(unit, entry, seed, found)
            except CannotJudge as error:
                entry["left out"].append([str(unit[0]), str(error)])
    entry["rules"] = sorted(set(entry["rules"]))
    return entry


def _units(variants: Sequence[Call]) -> Iterator[list[Call]]:
    """The ATen calls that the first variant comes to, each with those of the other variants beside it."""
    recorded = [dispatched(call) for call in variants]
    names = [call.name for call in recorded[0]]
    alike = [calls for calls in recorded if [call.name for call in calls] == names]
    for place in range(min(len(names), _MOST_DISPATCHED)):
        yield [calls[place] for calls in alike]


def _audit(variants: Sequence[Call], entry: dict[str, Any], seed: str, found: set[tuple[str, ...]]) -> None:
    samples = usable_samples([*variants, *narrowed(variants[0])])
    entry["rules"].append(variants[0].name)
    first: dict[Lie, Claim | Refused] = {}
    with torch.no_grad():
        for sample in samples:
            for parts in _MESHES:
                claims = _claims(sample, parts)
                if sample is samples[0] and parts == _MESHES[0]:
                    first = claims
                    entry["refused"] += sum(isinstance(claim, Refused) for claim in claims.values())
                entry["judged"] += sum(isinstance(claim, Claim) for claim in claims.values())
                for finding in _unsound(sample, parts, claims, seed):
                    key = _kind_of(finding, sample.call)
                    if key not in found:
                        found.add(key)
                        entry["unsound"].append(finding)
    entry["missing"] += _missing(variants, samples[0], first, seed)


def _kind_of(finding: dict[str, Any], call: Call) -> tuple[str, ...]:
    """What findings of the same fault have in common; the first of them is kept. A write to a copy is the fault of
    how the operand that is written to lies, however the others do."""
    copied = finding["kind"] == "writes to a copy"
    places = call.written if copied else range(len(finding["inputs"]))
    lie = [finding[which][place] for which in ("inputs", "runs on") for place in places]
    return (finding["rule"], finding["kind"], *lie, *([] if copied else finding["claims"]))


def narrowed(call: Call) -> list[Call]:
    """The call with one operand cut to half in one dimension, wherever it runs so: rules like to take for granted that
    sizes of operands agree, though the operator does not ask for it (an index of ``gather``)."""
    found: list[Call] = []
    if len(call.tensors) < 2:
        return found
    for place, tensor in enumerate(call.tensors):
        for dim, size in enumerate(tensor.shape):
            if size < 4:
                continue
            tensors = list(call.tensors)
            tensors[place] = tensor.narrow(dim, 0, size // 2).clone()
            one = call.with_tensors(tensors)
            try:
                one.run(one.tensors)
            except Exception:
                continue
            found.append(one)
    return found[:_MOST_NARROWED]


def _combinations(tensors: Sequence[torch.Tensor]) -> Iterator[Lie]:
    for partials in (PARTIALS, ("sum",)):
        some = [choices(tensor, partials) for tensor in tensors]
        count = int(np.prod([len(each) for each in some], dtype=float))
        if count <= _MOST_COMBINATIONS:
            break
    for combination in itertools.product(*some):
        if count <= _MOST_COMBINATIONS or sum(p != B for p in combination) <= 2:
            yield combination


def _claims(sample: Sample, parts: int) -> dict[Lie, Claim | Refused]:
    claims: dict[Lie, Claim | Refused] = {}
    for lie in _combinations(sample.call.tensors):
        # DTensor has no way to make a tensor whose split leaves it without a counterpart; empty pieces it has.
        try:
            claims[lie] = ask(sample.call, lie, parts)
        except Refused as refusal:
            claims[lie] = refusal
        except Unknown:
            continue
    return claims


def _unsound(
    sample: Sample, parts: int, claims: dict[Lie, Claim | Refused], seed: str
) -> Iterator[dict[str, Any]]:
    call = sample.call
    random = np.random.default_rng(stable_seed("audit", seed, call.name, sample.number, parts))
    placements = [candidates(output) for output in sample.outputs]
    some: list[list[Placement]] = [choices(tensor) for tensor in call.tensors]
    for claim in claims.values():
        if isinstance(claim, Claim):
            for place, placement in enumerate(claim.inputs):
                if placement not in some[place]:
                    some[place].append(placement)
    experiment = Experiment(call.run, call.tensors, some, sample.outputs, placements, parts, random)
    for lie, claim in claims.items():
        if isinstance(claim, Refused):
            continue

        def told(kind: str, lie: Lie = lie, claim: Claim = claim) -> dict[str, Any]:
            return {
                "rule": call.name,
                "call": str(call),
                "mesh": parts,
                "inputs": [str(p) for p in lie],
                "runs on": [str(p) for p in claim.inputs],
                "claims": [str(p) for p in claim.outputs],
                "kind": kind,
            }

        if any(claim.inputs[place] != lie[place] for place in call.written):
            yield told("writes to a copy")
            continue
        if len(claim.outputs) != len(sample.outputs):
            continue
        if any(output not in allowed for output, allowed in zip(claim.outputs, placements)):
            continue
        combination = tuple(some[place].index(p) for place, p in enumerate(claim.inputs))
        runs: list[Callable[..., Any]] | None = None
        if claim.local is not None:
            everything = [(t, p) for t, p in zip(call.tensors, claim.inputs)]
            everything += list(zip(sample.outputs, claim.outputs))
            if any(unevenness(tensor.shape, p, parts) for tensor, p in everything):
                continue  # each rank is given other arguments, of which those of the first are known alone
            runs = [claim.local.run] * parts
        (right,) = experiment.evaluate([combination], runs)
        if right is None:
            yield told("the local operator fails")
        elif any(
            not right[number] >> allowed.index(output) & 1
            for number, (output, allowed) in enumerate(zip(claim.outputs, placements))
        ):
            yield told("wrong result")


def _missing(
    variants: Sequence[Call], sample: Sample, claims: dict[Lie, Claim | Refused], seed: str
) -> list[dict[str, Any]]:
    """True signatures whose inputs the subject refuses, or moves first."""
    try:
        findings = find_signatures(variants, seed=seed, partials=("sum",))
    except CannotJudge:
        return []
    true: dict[tuple[str, ...], dict[int, list[str]]] = {}
    for signature in findings.signatures:
        if set(signature.needs) <= {LOCAL_SIZES}:
            true.setdefault(signature.inputs, {}).setdefault(signature.output, []).append(signature.placement)
    missing = []
    for lie, claim in claims.items():
        outputs = true.get(tuple(str(p) for p in lie), {})
        if len(outputs) != len(sample.outputs):
            continue
        line: dict[str, Any] = {
            "rule": sample.call.name,
            "call": str(sample.call),
            "mesh": _MESHES[0],
            "inputs": [str(p) for p in lie],
            "true": [outputs[number] for number in range(len(sample.outputs))],
        }
        if isinstance(claim, Refused):
            missing.append({**line, "refused": str(claim)})
        elif claim.inputs != lie:
            cost = traffic(sample.call.tensors, lie, claim.inputs, _MESHES[0])
            if cost.collectives:
                moved = [str(p) for p in claim.inputs]
                missing.append(
                    {**line, "runs on": moved, "collectives": cost.collectives, "bytes": cost.received}
                )
    return missing
