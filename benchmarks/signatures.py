"""Placement combinations judged per CPU second, beside the one tool that does part of the same.

    python benchmarks/signatures.py [--calls 2] [OP...]

That tool is torch's own torch.distributed.tensor._ops.strategy_validation (private; this file is the only one that
touches it). It runs as it is, in float32 on a mesh of 2, with the even sizes of its own command line. What it calls an
operator with is caught on the way, and the same calls are then judged by sbp.oracle.signatures on the same mesh. Each
operator has a process of its own. CPU time is measured, of both in that same process.

A combination is one choice of input placements with one placement of an output. The validator gives all outputs of an
operator the same placement; here each output is judged on its own, so an operator of three outputs has more of them.

Where the two differ over a combination, that one is looked at again, with nothing of either tool but sbp.placement:

- rounding: the validator calls it false, and calls it true in float64.
- cannot be run: the validator calls it false because its own run of it raised.
- refuted: the validator calls it true, and pieces drawn at random combine to a wrong result; the largest error is
  shown.
- NOT UNDERSTOOD: none of these. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from sbp.apart import Died, call_apart

OPERATORS = ("add", "mul", "relu", "softmax", "layer_norm", "sum", "cat", "index_select", "matmul", "bmm")
RANKS = 2
# Random pieces drawn at most to refute what the validator accepts.
DRAWS = 60
_WARM_UP = "neg"
# For one operator, in seconds: some take torch's validator many minutes.
_PATIENCE = 3600.0
NOT_UNDERSTOOD = "NOT UNDERSTOOD"

Inputs = tuple[str, ...]
Key = tuple[Inputs, str]


@dataclass
class Captured:
    """One call that the validator judged, with what it found: combinations as (input placements, placement of all
    outputs), in sbp's words."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    combinations: int = 0
    true: set[Key] = field(default_factory=set)
    rules: set[Key] = field(default_factory=set)
    untestable: set[Key] = field(default_factory=set)


@dataclass
class Row:
    """What one operator's process found out."""

    operator: str
    calls: int = 0
    theirs: int = 0
    their_seconds: float = 0.0
    ours: int = 0
    our_seconds: float = 0.0
    their_unsound: int = 0
    our_unsound: int = 0
    differences: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


def in_our_words(placement: str) -> str:
    """A placement as sbp writes it."""
    return {"R": "B", "P(sum)": "P"}.get(placement, placement)


def key_in_our_words(key: Any) -> Key:
    inputs, outputs = key
    return tuple(map(in_our_words, inputs)), in_our_words(outputs[0])


def capture(operator: str, calls: int) -> tuple[list[Captured], float]:
    """Run torch's validator on the first ``calls`` calls that it can judge; returns these and the CPU
    seconds that it took."""
    import torch
    import torch.distributed.tensor._ops.strategy_validation as validation

    from sbp.fake_world import fake_world

    for module in (validation.opinfo_core, validation.common_ops):
        for size, value in {"L": 24, "M": 12, "S": 4, "XS": 2}.items():
            setattr(module, size, value)
    found: list[Captured] = []
    judge, compare = validation._validate_aten_op_for_sample, validation._compare_rules

    def noting_calls(function: Any, args: Any, kwargs: Any, *others: Any, **more: Any) -> Any:
        if len(found) == calls:
            return 0, 0
        found.append(Captured(function, args, kwargs))
        counted = judge(function, args, kwargs, *others, **more)
        found[-1].combinations = counted[1]
        return counted

    def noting_rules(true: Any, rules: Any, *others: Any) -> None:
        found[-1].true = set(map(key_in_our_words, true))
        found[-1].rules = set(map(key_in_our_words, rules))
        found[-1].untestable = set(map(key_in_our_words, others[-1]))
        compare(true, rules, *others)

    validation._validate_aten_op_for_sample = noting_calls
    validation._compare_rules = noting_rules
    try:
        with fake_world(RANKS):
            (name,) = validation.resolve_op_names([operator])
            start = time.process_time()
            validation.compare_operator(name, "cpu", torch.float32, RANKS)
            seconds = time.process_time() - start
    finally:
        validation._validate_aten_op_for_sample, validation._compare_rules = judge, compare
    return [call for call in found if call.combinations], seconds


def judge_operator(operator: str, calls: int) -> Row:
    """Both tools on one operator."""
    import torch

    from sbp.oracle.calls import Call
    from sbp.oracle.signatures import find_signatures

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # What either does once in a process (imports, above all) is not what is measured.
    for one in capture(_WARM_UP, 1)[0]:
        find_signatures([Call(_WARM_UP, one.function, one.args, one.kwargs)], (RANKS,))
    captured, seconds = capture(operator, calls)
    row = Row(operator, len(captured), sum(call.combinations for call in captured), seconds)
    if not captured:
        row.note = "the validator judges no call of it"
        return row
    explained: Counter[tuple[str, str]] = Counter()
    for one in captured:
        call = Call(operator, one.function, one.args, one.kwargs)
        start = time.process_time()
        findings = find_signatures([call], (RANKS,), operator)
        row.our_seconds += time.process_time() - start
        row.ours += findings.judged
        by_output: list[set[Key]] = [set() for _ in findings.outputs]
        for signature in findings.signatures:
            if "local sizes" not in signature.needs:
                by_output[signature.output].add((signature.inputs, signature.placement))
        true = set.intersection(*by_output)
        shared = set(comparable(call)) - one.untestable
        row.their_unsound += len((one.rules & shared) - one.true)
        row.our_unsound += len((one.rules & shared) - true)
        for key in sorted(shared & (one.true ^ true)):
            why = explain(one, call, key)
            explained[f"{', '.join(key[0])} -> {key[1]}", why] += 1
    row.differences = [(text, f"{why} ({n} calls)" if n > 1 else why) for (text, why), n in explained.items()]
    return row


def comparable(call: Any) -> Iterator[Key]:
    """The combinations that both tools judge: not those that split a dimension of size 1, which the validator takes
    for B, or one that is not even."""
    from sbp.oracle.calls import results
    from sbp.oracle.experiment import candidates
    from sbp.oracle.pieces import choices

    def evenly(tensor: Any, placement: Any) -> bool:
        if not placement.is_split:
            return True
        size = tensor.shape[placement.dim]
        return bool(size > 1 and size % RANKS == 0)

    inputs = [[str(p) for p in choices(tensor) if evenly(tensor, p)] for tensor in call.tensors]
    output = results(call.run(call.tensors))[0]
    outputs = [str(p) for p in candidates(output) if evenly(output, p) and str(p) not in ("P(product)",)]
    for some in itertools.product(*inputs):
        if set(some) != {"B"}:
            for placement in outputs:
                yield some, placement


def explain(one: Captured, call: Any, key: Key) -> str:
    """Why the two differ over a combination."""
    if key in one.true:
        error = largest_error(call, key)
        return (
            NOT_UNDERSTOOD
            if error is None
            else f"refuted: a draw is wrong by {error:.2g} of the largest value"
        )
    valid, why = ask_again_in_float64(one, key)
    if valid:
        return "rounding: the validator calls it true in float64"
    return (
        f"cannot be run by the validator: {why.splitlines()[0][:80]}"
        if "Exception" in why
        else NOT_UNDERSTOOD
    )


def ask_again_in_float64(one: Captured, key: Key) -> tuple[bool | None, str]:
    """The validator's own judgement of one combination, in float64."""
    import torch
    import torch.distributed.tensor._ops.strategy_validation as validation
    import torch.utils._pytree as pytree
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard

    from sbp.fake_world import fake_world
    from sbp.oracle.calls import results
    from sbp.placement import parse

    def in_their_words(text: str) -> Placement:
        placement = parse(text)
        if placement.is_partial:
            return Partial(placement.reduction)
        return Shard(placement.dim) if placement.is_split else Replicate()

    def widen(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(widen, (one.args, one.kwargs))
    truth = one.function(*args, **kwargs)
    outputs = (in_their_words(key[1]),) * len(results(truth))
    combination = (tuple(map(in_their_words, key[0])), outputs)
    with fake_world(RANKS), LocalTensorMode(frozenset(range(RANKS))):
        mesh = init_device_mesh("cpu", (RANKS,))
        whole = truth if isinstance(truth, torch.Tensor) else list(truth)
        valid, why = validation.validate_aten_combination(
            one.function, args, kwargs, whole, combination, RANKS, mesh
        )
    return valid, why


def largest_error(call: Any, key: Key) -> float | None:
    """The first error, as a share of the largest value, that random pieces show in float64; None where none does."""
    import numpy as np
    import torch

    from sbp.oracle.calls import results
    from sbp.placement import LayoutError, Mesh, combine, parse, split

    mesh, random = Mesh((RANKS,)), np.random.default_rng(0)
    plain = [t.double() if t.is_floating_point() else t for t in call.tensors]
    for draw in range(DRAWS):
        # The call's own values, the same negated, and new ones.
        tensors = [
            t if draw % 3 == 0 or not t.is_floating_point() else -t if draw % 3 == 1 else torch.randn_like(t)
            for t in plain
        ]
        pieces = [split(t.numpy(), (parse(word),), mesh, random) for t, word in zip(tensors, key[0])]
        truths = [truth.numpy() for truth in results(call.run(tensors))]
        by_rank = [
            [r.numpy() for r in results(call.run([torch.from_numpy(p[rank]) for p in pieces]))]
            for rank in range(RANKS)
        ]
        for number, truth in enumerate(truths):
            try:
                found = combine([one[number] for one in by_rank], (parse(key[1]),), mesh, truth.shape)
            except LayoutError:
                return float("inf")
            # Of ranks that hold the same (B), each has to be right.
            held = [one[number] for one in by_rank] if key[1] == "B" else [found]
            error = max(float(np.abs(h - truth).max() / np.abs(truth).max()) for h in held)
            if error > 1e-6:
                return error
    return None


def in_own_process(operator: str, calls: int) -> Row:
    """Run it in a fresh process: the validator may take the interpreter with it, and patches torch."""
    try:
        return call_apart(partial(judge_operator, operator, calls), _PATIENCE)
    except Died as how:
        return Row(operator, note=f"no result: {how}")


def show(row: Row) -> str:
    """One line of the table."""
    if row.note:
        return f"{row.operator:<13} {row.note}"
    per_second = (row.ours / row.our_seconds) / (row.theirs / row.their_seconds)
    return (
        f"{row.operator:<13} {row.calls:>5} {row.theirs:>9,} {row.their_seconds:>9.2f} {row.ours:>9,}"
        f" {row.our_seconds:>9.3f} {per_second:>7,.0f}x {row.their_seconds / row.our_seconds:>7,.0f}x"
        f" {row.their_unsound:>8} {row.our_unsound:>7}"
    )


def total(rows: Sequence[Row]) -> Row:
    whole = Row("together")
    for row in rows:
        for name in (
            "calls",
            "theirs",
            "their_seconds",
            "ours",
            "our_seconds",
            "their_unsound",
            "our_unsound",
        ):
            setattr(whole, name, getattr(whole, name) + getattr(row, name))
    return whole


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operators", nargs="*", default=OPERATORS, metavar="OP")
    parser.add_argument("--calls", type=int, default=2, help="of each operator (default 2)")
    parser.add_argument("--json", metavar="FILE", help="also write what was found to FILE")
    options = parser.parse_args(words)
    print(
        f"{'':<13} {'':>5} {'torch':>9} {'CPU s':>9} {'sbp':>9} {'CPU s':>9} {'per CPU':>8} {'same':>8}"
        f" {'unsound':>16}\n"
        f"{'operator':<13} {'calls':>5} {'combin.':>9} {'':>9} {'combin.':>9} {'':>9} {'second':>8} {'calls':>8}"
        f" {'torch':>8} {'sbp':>7}",
        flush=True,
    )
    rows = []
    for operator in options.operators:
        rows.append(in_own_process(operator, options.calls))
        print(show(rows[-1]), flush=True)
    judged = [row for row in rows if row.calls]
    if judged:
        print(show(total(judged)))
    print("\ndifferences over combinations that both judge")
    for row in rows:
        by_reason = Counter(why for _, why in row.differences)
        for why, count in by_reason.items():
            like = next(text for text, reason in row.differences if reason == why)
            print(f"  {row.operator}: {count} x {why}; such as {like}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    strange = sum(why.startswith(NOT_UNDERSTOOD) for row in rows for _, why in row.differences)
    return 1 if strange else 0


if __name__ == "__main__":
    sys.exit(main())
