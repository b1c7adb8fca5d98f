"""Subjects in another interpreter: the worker that runs them, and all that one has to provide.

A subject is any framework of global tensors that Python 3.10 can import beside numpy. It is a class (see
:class:`Subject`) that makes global tensors from pieces and runs *recipes* with them; docs/add-a-subject.md shows how.
This module needs the standard library and numpy, nothing else, and never torch.
"""

from __future__ import annotations

import importlib
import operator
import os
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sbp.placement import Mesh, parse_mesh, parse_sbp, show, split
from sbp.rank_logs import say_trial
from sbp.trial import Trial, stable_seed
from sbp.verdict.compare import Observed

_KEPT_CASES = 64
# Under this name a subject may observe how many elements changed in each of some tensors that stand beside those that
# are written to; 64-bit integers, all zero where nothing went wrong.
NEIGHBOURS = "neighbouring memory"


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks, and where their rendezvous is: nothing listens there yet."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    timeout: float


@dataclass(frozen=True)
class Piece:
    """This rank's piece of a tensor that is to become a global one.

    Attributes:
        local: the piece; a fresh copy.
        sbp: how the global tensor lies, as text: ``(S(0), B)``.
        shape: of the global tensor.
    """

    local: np.ndarray[Any, Any]
    sbp: str
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Task:
    """A trial as a subject sees it: see :func:`sbp.material.task_of` for what the recipe holds.

    Attributes:
        mesh: the ranks as a grid.
        inputs, parameters, buffers: this rank's pieces, by name.
        constants: whole tensors that the recipe refers to.
        cotangents: the outputs that have one; cotangent: the piece of it, by the output's name.
        aliases: second names of parameters and buffers -> the first.
        writes: the inputs to be observed afterwards.
        optimizer: class and options, None outside training.
        options: the trial's own. ``{"mode": "local"}`` asks for a run without any distribution, on each rank alone
            and on whole tensors that are not global; other modes are the subject's.
        seed: of random numbers; None where each rank is to have its own.
        reverse: whether this rank is to take the steps, which do not depend on each other, in the reverse order.
    """

    mesh: Mesh
    recipe: Mapping[str, Any]
    inputs: Mapping[str, Piece]
    parameters: Mapping[str, Piece]
    buffers: Mapping[str, Piece]
    cotangents: tuple[str, ...]
    cotangent: Callable[[str], Piece]
    constants: Mapping[str, np.ndarray[Any, Any]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    optimizer: Mapping[str, Any] | None = None
    steps: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = 0
    reverse: bool = False


Observe = Callable[[Observed], None]


class Subject(Protocol):
    """What a subject provides. It is made once for a world: ``Subject(world)`` joins the other ranks and raises where
    they are not all there."""

    balanced: bool
    """Whether an uneven split makes the first pieces one longer (numpy.array_split), not all but the last equal
    (torch.chunk)."""

    def run(self, task: Task, observe: Observe) -> None:
        """Run a trial, and observe each result as soon as it is known. Raises what the framework raises."""

    def barrier(self) -> None:
        """Meet the other ranks."""

    def explain(self, error: BaseException) -> tuple[str, bool]:
        """What an exception says, without the framework's own noise; and whether the framework says clearly that it
        does not support this."""


class Host:
    """One rank's worker around a subject: answers the requests of the first rank.

    Args:
        make: makes the subject.
        context: who this rank is (launch.WorkerContext).
    """

    def __init__(self, make: Callable[[World], Subject], context: Any) -> None:
        self.make = make
        self.context = context
        self.subject: Subject | None = None
        self._cases: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    def handle(self, request: Mapping[str, Any]) -> Any:
        answer: Callable[[Mapping[str, Any]], Any] = getattr(self, f"do_{request['do']}")
        return answer(request)

    def do_open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """On the first rank only: find a free port."""
        import socket

        with socket.socket() as free:
            free.bind((request["host"], 0))
            return {"port": free.getsockname()[1]}

    def do_join(self, request: Mapping[str, Any]) -> None:
        """Become one rank of the subject's world."""
        here = self.context
        world = World(
            here.rank, here.size, here.local_rank, request["host"], request["port"], request["timeout"]
        )
        self.subject = self.make(world)

    def do_barrier(self, request: Mapping[str, Any]) -> None:
        assert self.subject is not None
        self.subject.barrier()

    def do_prepare(self, request: Mapping[str, Any]) -> None:
        """Keep what a case's trials need."""
        self._cases[request["case"]] = request["task"]
        if len(self._cases) > _KEPT_CASES:
            self._cases.popitem(last=False)

    def do_trial(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one trial; the answer holds what this rank observed and the error that the subject raised, if any."""
        begin = time.perf_counter()
        assert self.subject is not None
        trial = Trial.from_dict(request["trial"])
        say_trial(self.context.rank, trial.id)
        task = cut_task(self._cases[request["case"]], trial, self.context.rank, self.subject.balanced)
        observed: list[Observed] = []
        error: dict[str, Any] | None = None
        start = time.perf_counter()
        try:
            self.subject.run(task, observed.append)
        except Exception as raised:
            error = describe_error(raised, self.subject.explain)
        end = time.perf_counter()
        answer: dict[str, Any] = {
            "observed": [vars(each) for each in observed],
            "subject_seconds": end - start,
            "harness_seconds": time.perf_counter() - end + start - begin,
        }
        if error is not None:
            answer["error"] = error
        return answer


def cut_task(data: Mapping[str, Any], trial: Trial, rank: int, balanced: bool) -> Task:
    """One rank's task of a trial."""
    mesh = parse_mesh(trial.mesh)

    def piece(name: str, tensor: Mapping[str, Any]) -> Piece:
        full = tensor["value"]
        alone = trial.options.get("mode") == "local"
        sbp = parse_sbp("B" if alone else trial.placements.get(name, "B"), mesh)
        random = np.random.default_rng(stable_seed("pieces", trial.case, name, show(sbp), mesh))
        cut_by = balanced_sbp(sbp) if balanced else sbp
        local = np.array(split(full, cut_by, mesh, random)[rank])
        return Piece(local, show(sbp), full.shape, tensor["requires_grad"])

    def cotangent(name: str) -> Piece:
        return piece(f"grad_{name}", {"value": data["cotangents"][name], "requires_grad": False})

    def pieces(kind: str) -> dict[str, Piece]:
        return {name: piece(name, tensor) for name, tensor in data[kind].items()}

    return Task(
        mesh,
        data["recipe"],
        pieces("inputs"),
        pieces("parameters"),
        pieces("buffers"),
        tuple(data["cotangents"]),
        cotangent,
        data["recipe"]["constants"],
        data["aliases"],
        tuple(data["writes"]),
        data["optimizer"],
        data["steps"],
        trial.options,
        None if trial.options.get("unseeded") else data["seed"],
        trial.options.get("reversed_on") == rank,
    )


def balanced_sbp(sbp: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same SBP with splits whose first pieces are one longer."""
    import dataclasses

    return tuple(dataclasses.replace(one, balanced=True) if one.is_split else one for one in sbp)


# --------------------------------------------------------------------------------------- running a recipe


class Missing(NotImplementedError):
    """The framework has no function, method or module of that name."""


def run_recipe(
    recipe: Mapping[str, Any],
    tensors: dict[str, Any],
    find: Callable[[str, str], Any],
    convert: Callable[[Mapping[str, Any]], Any],
    reverse: bool = False,
) -> dict[str, Any]:
    """Run a recipe's steps.

    Args:
        recipe: as recorded.
        tensors: reference -> tensor (``in NAME``, ``state NAME``, ``constant N``); results are added.
        find: called with ``function`` and ``nn.functional.gelu``, or ``module`` and a path: what is to be called.
        convert: makes what stands for a dtype, a device or an array out of its description.
        reverse: begin with the last step.

    Returns: the outputs by name.
    """

    def value(item: Any) -> Any:
        if isinstance(item, dict):
            if "ref" in item:
                return tensors[item["ref"]]
            if "slice" in item:
                return slice(*map(value, item["slice"]))
            if "ellipsis" in item:
                return Ellipsis
            if "dict" in item:
                return {value(key): value(part) for key, part in item["dict"]}
            return convert(item)
        if isinstance(item, tuple):
            return tuple(map(value, item))
        return [value(part) for part in item] if isinstance(item, list) else item

    for step in reversed(recipe["steps"]) if reverse else recipe["steps"]:
        do, name = step["do"], step["name"]
        args = [value(item) for item in step["args"]]
        kwargs = {key: value(item) for key, item in step["kwargs"]}
        if do == "operator":
            result = getattr(operator, name if hasattr(operator, name) else f"{name}_")(*args)
        elif do == "method":
            result = getattr(args[0], name)(*args[1:], **kwargs)
        elif do == "get":
            result = getattr(args[0], name)
        elif do == "set":
            setattr(args[0], name, args[1])
            result = None
        else:
            result = find(do, name)(*args, **kwargs)
        _bind(step["into"], result, tensors)
    return {name: tensors[reference["ref"]] for name, reference in recipe["outputs"].items()}


def _bind(into: Any, result: Any, tensors: dict[str, Any]) -> None:
    if isinstance(into, dict):
        if not into.get("same"):
            tensors[into["ref"]] = result
    elif isinstance(into, list):
        for part, item in zip(into, result):
            _bind(part, item, tensors)


# ------------------------------------------------------------------------------------------------- errors


def describe_error(
    error: BaseException, explain: Callable[[BaseException], tuple[str, bool]]
) -> dict[str, Any]:
    """An exception as plain data."""
    try:
        message, refused = explain(error)
    except Exception:
        message, refused = "(the exception's text could not be made)", False
    trace = traceback.format_exception(type(error), error, error.__traceback__)
    return {
        "type": type(error).__name__,
        "message": message[:4000],
        "traceback": "".join(trace)[-8000:],
        "refused": refused,
    }


def start(context: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The entry that launch calls in a new worker. The subject's class is named by SBP_SUBJECT, ``module:class``."""
    module, _, name = os.environ["SBP_SUBJECT"].partition(":")
    return Host(getattr(importlib.import_module(module), name), context).handle
