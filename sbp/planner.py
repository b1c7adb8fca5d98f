"""Plans the trials in a process of its own, so that the first ones run while the last are still being planned."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sbp.placement import PlacementError, parse_mesh
from sbp.plan import PlanOptions
from sbp.select import SelectionError, compile_expression, matches_target, suggest
from sbp.suites import DEFAULT, Suite, SuiteError, find_suite, is_users, skipped_cases
from sbp.trial import Trial, stable_seed

# How many trials of a case come in the first pass, when the time is bounded: the most telling ones come first, and
# each pass takes twice as many.
_FIRST_PASS = 4


def plan_trials(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Plan the trials that a request asks for.

    Args:
        request: ``suites``, ``targets``, ``keyword`` (``-k``), ``ids``, ``meshes``, ``dtypes``, ``device``,
            ``placements``, ``rows``, ``subject``, ``in_passes`` (breadth first, for a bounded time).

    Yields: ``{"trials": [...]}`` as they are known, at last ``{"done": True, "skipped": {case: reason}}``. Bad input
        gives one ``{"error": line}`` and nothing more.
    """
    try:
        yield from _plan(request)
    except (SelectionError, SuiteError, PlacementError) as error:
        yield {"error": str(error)}


def _plan(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    options = PlanOptions(
        meshes=tuple(parse_mesh(text) for text in request["meshes"]),
        dtypes=tuple(request["dtypes"]),
        device=request["device"],
        placements=request.get("placements"),
        rows=request.get("rows"),
        subject=request["subject"],
    )
    expression = compile_expression(request["keyword"]) if request.get("keyword") else None
    ids = set(request.get("ids") or ())
    offered = request.get("offered")
    planned = 0
    waiting: list[list[Trial]] = []
    skipped: dict[str, str] = {}
    plans: Iterable[tuple[Suite, Iterable[Trial]]] = (
        (suite, suite.plan(case, options))
        for suite, case in _cases(request["suites"], request["targets"])
        if _in_shard(case, request.get("shard")) and _can_run(suite, case, offered, skipped)
    )
    if any(is_users(target) for target in request["targets"]):
        # An error in somebody's own file is said before anything runs.
        plans = [(suite, list(plan)) for suite, plan in plans]
    for suite, plan in plans:
        if offered is not None:
            every = list(plan)
            plan = [*_without_distribution(every), *every]
            if options.rows is None or "mode=" in (request.get("keyword") or ""):
                plan += _in_modes(every, offered["modes"])
        trials = [
            trial
            for trial in plan
            if (not ids or trial.id in ids) and (expression is None or expression(trial.id))
        ]
        skipped.update(skipped_cases(suite))
        if request.get("in_passes"):
            trials, rest = trials[:_FIRST_PASS], trials[_FIRST_PASS:]
            waiting.append(rest)
        if trials:
            planned += len(trials)
            yield {"trials": [trial.to_dict() for trial in trials]}
    size = _FIRST_PASS
    while any(waiting):
        size *= 2
        for rest in waiting:
            now, rest[:] = rest[:size], rest[size:]
            if now:
                planned += len(now)
                yield {"trials": [trial.to_dict() for trial in now]}
    if not planned and ids:
        raise SelectionError(f"no trial has the id {min(ids)}; --list shows the ids")
    if not planned and request.get("keyword"):
        raise SelectionError(f"-k {request['keyword']!r} matches no trial; --list shows the ids")
    if not planned and skipped and not request.get("shard") and any(map(is_users, request["targets"])):
        raise SelectionError("; ".join(f"case {case} {reason}" for case, reason in skipped.items()))
    yield {"done": True, "planned": planned, "skipped": skipped}


def _can_run(suite: Suite, case: str, offered: Mapping[str, Any] | None, skipped: dict[str, str]) -> bool:
    """Whether the subject has what a case needs; ``offered`` is None for torch itself."""
    if offered is None:
        return True
    from sbp.material import why_not

    reason = why_not(suite.name, case, offered)
    if reason is not None:
        skipped[case] = reason
    return reason is None


def _without_distribution(trials: list[Trial]) -> list[Trial]:
    """One trial for each way in which a case is run: what the subject makes of it on one device."""
    found: dict[tuple[Any, ...], Trial] = {}
    for trial in trials:
        alone = trial.on_one_device()
        key = (alone.case, alone.kind, alone.dtype, tuple(sorted(alone.options.items())))
        found.setdefault(key, alone)
    return list(found.values())


def _in_modes(trials: list[Trial], modes: Sequence[str]) -> list[Trial]:
    """One trial of each kind on each mesh again, in each of the subject's other ways to run a program."""
    found: dict[tuple[Any, ...], Trial] = {}
    for mode in modes:
        for trial in trials:
            kind = (mode, trial.mesh, trial.kind, trial.dtype, tuple(sorted(trial.options.items())))
            if trial.placements:
                found.setdefault(kind, replace(trial, options={**trial.options, "mode": mode}))
    return list(found.values())


def _in_shard(case: str, shard: Sequence[int] | None) -> bool:
    """Whether a case belongs to part K of N. Whole cases, since a case's trials share its reference."""
    return shard is None or stable_seed("shard", case) % shard[1] == shard[0] - 1


def _cases(suites: list[str], targets: list[str]) -> Iterator[tuple[Suite, str]]:
    """The cases of the suites that the targets mean, all without targets, as they are found.

    Raises SelectionError after the last case where a target means none.
    """
    seen: list[str] = []
    users = [target for target in targets if is_users(target)]
    targets = [target for target in targets if target not in users]
    missing = set(targets)
    found = [_users_cases(target) for target in users]
    if not users:
        named = [find_suite(name) for name in suites or DEFAULT]
        found = [(suite, suite.cases()) for suite in named]
    for suite, cases in found:
        for case in cases:
            seen.append(case)
            meant = [target for target in targets if matches_target(case, target)]
            missing.difference_update(meant)
            if meant or not targets:
                yield suite, case
            # Whole names mean one case each: nothing more is to be looked for.
            if targets and not missing and set(targets) <= set(seen):
                return
    for target in targets:
        if target in missing:
            raise SelectionError(suggest(target, seen))


def _users_cases(target: str) -> tuple[Suite, Iterable[str]]:
    """A user's suite and the cases of it that a target means."""
    from sbp.suites.users import chosen_cases, normalise_target

    suite = find_suite(normalise_target(target))
    return suite, chosen_cases(target, suite)


def serve(request: Mapping[str, Any], connection: Any) -> None:
    """The entry of the planning process: sends what :func:`plan_trials` yields, in order."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for message in plan_trials(request):
        connection.send(message)
