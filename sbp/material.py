"""What a subject in another interpreter is told of a case, and what one device computes for it, as plain data.

Runs in a process of its own beside the first rank: the reference stays in the torch of this installation.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from sbp.execute import MakeOptimizer
from sbp.oracle.reference import Reference, compute_reference
from sbp.portable import NotPortable, noting_constructors, optimizer_as_data, record
from sbp.program import Program, to_numpy
from sbp.suites import find_suite
from sbp.trial import Trial, stable_seed


def prepare_case(trial: Trial, offered: Collection[str] | None = None) -> dict[str, Any]:
    """The material of a trial's case.

    Returns: ``task`` for the subject (see :func:`task_of`), and ``expected`` for the judge: name -> kind, value, dtype
        and norm of each quantity.

    Raises NotPortable.
    """
    suite = find_suite(trial.suite)
    with noting_constructors():
        program = suite.build(trial.case, trial.dtype, "cpu")
        make_optimizer = suite.make_optimizer(trial)
        seed = stable_seed("run", trial.case) % 2**31
        reference = compute_reference(program, trial.case, make_optimizer, seed)
        task = task_of(program, reference, make_optimizer, offered)
    task["seed"] = seed
    expected = {
        name: {"kind": due.kind, "value": due.value, "dtype": due.dtype, "norm": due.norm}
        for name, due in reference.quantities.items()
    }
    return {"task": task, "expected": expected}


def task_of(
    program: Program,
    reference: Reference,
    make_optimizer: MakeOptimizer | None,
    offered: Collection[str] | None,
) -> dict[str, Any]:
    """What a subject needs to run a program: the recipe, all tensors with their values, and the cotangents.

    Raises NotPortable.
    """
    state = {**program.parameters(), **program.buffers()}
    aliases = {}
    if program.module is not None:
        first = {id(tensor): name for name, tensor in state.items()}
        module = program.module
        every = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        aliases = {name: first[id(tensor)] for name, tensor in every if first.get(id(tensor), name) != name}
    return {
        "recipe": record(program, offered),
        "inputs": {name: _tensor(tensor) for name, tensor in program.inputs().items()},
        "parameters": {name: _tensor(tensor) for name, tensor in program.parameters().items()},
        "buffers": {name: _tensor(tensor) for name, tensor in program.buffers().items()},
        "aliases": aliases,
        "writes": list(program.writes),
        "random": program.random,
        "promise": program.promise,
        "cotangents": dict(reference.cotangents),
        "optimizer": optimizer_as_data(program, make_optimizer),
        "steps": program.recipe.steps,
    }


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = to_numpy(tensor)
    if str(values.dtype) != dtype:
        raise NotPortable(f"numpy has no {dtype}")
    return {"value": values, "requires_grad": tensor.requires_grad}


def why_not(suite_name: str, case: str, offered: Mapping[str, Any]) -> str | None:
    """Why a framework that has the ``offered`` names cannot run a case; None where it can.

    ``offered`` is what the subject's :func:`offers` returns: ``name``, ``modules``, ``functions``, ``methods``.
    """
    try:
        with noting_constructors():
            program = find_suite(suite_name).build(case, "float64", "cpu")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recipe = record(program, offered["modules"])
    except NotPortable as error:
        return str(error)
    for need in recipe["needs"]:
        kind, _, name = need.rpartition(" ")
        known = {"function": "functions", "method": "methods", "get": "methods", "set": "methods"}.get(kind)
        if known is not None and name not in offered[known]:
            return f"{offered['name']} has no {'Tensor.' if known == 'methods' else ''}{name}"
        if not kind and name.removeprefix("nn.") not in offered["modules"]:
            return f"{offered['name']} has no {name}"
    return None


def serve(request: Mapping[str, Any], connection: Any) -> None:
    """The entry of the process: answers each trial with its case's material, or why there is none."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    warnings.simplefilter("ignore")
    while True:
        message = connection.receive()
        try:
            answer = prepare_case(Trial.from_dict(message["trial"]), message.get("modules"))
        except NotPortable as error:
            answer = {"why_not": str(error)}
        except Exception as error:
            answer = {"why_not": f"the reference itself raises {type(error).__name__}: {error}"}
        connection.send(answer)
