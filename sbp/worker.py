"""What runs inside each rank's worker process: it takes trials one by one and returns what this rank found.

The worker keeps the cases' programs and references that it has built: the reference does not depend on the
placements, so it is computed once for a case and serves all its trials.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sbp.inplace.in_trials import watching
from sbp.moves import REVERSED
from sbp.oracle.noise import low_reference, with_noise_of_cancelled
from sbp.oracle.reference import Reference, compute_reference
from sbp.oracle.tolerance import is_low
from sbp.placement import parse_mesh
from sbp.process_state import changes, state
from sbp.program import Program
from sbp.rank_logs import say_trial
from sbp.subjects.dtensor import DTensorSubject, is_refusal, lacks_kernel
from sbp.subjects.mpi import expect_mpi
from sbp.subjects.parallel import ParallelSubject
from sbp.subjects.pieces import spread_of_pieces
from sbp.suites import define_suite, find_suite
from sbp.trial import Trial, stable_seed
from sbp.verdict.compare import Observed, compare_all, computed_in

_KEPT_REFERENCES = 64


@dataclass
class _Case:
    program: Program
    reference: Reference
    # Below float64, by how much larger than the inputs their pieces are.
    low: dict[float | None, Reference] = field(default_factory=dict)


class Worker:
    """One rank of a world: takes requests as plain data and answers likewise. What a trial's subject raises is
    part of the answer, beside the comparison of what was reached before."""

    def __init__(self, rank: int, size: int, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.subject: DTensorSubject | None = None
        self._cases: OrderedDict[str, _Case] = OrderedDict()
        self._store: dist.TCPStore | None = None
        self._observed: dict[str, Observed] = {}
        self._reference: Reference | None = None
        self._replay: Any = None

    def handle(self, request: Mapping[str, Any]) -> Any:
        operation: Callable[[Mapping[str, Any]], Any] = getattr(self, f"do_{request['do']}")
        return operation(request)

    # ---------------------------------------------------------------------------------- making the world

    def do_open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """On the first rank only: open the rendezvous on a free port and say which."""
        # Left to itself the store would listen on all of the host's addresses.
        listener = socket.create_server((request["host"], 0), backlog=self.size)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            request["host"],
            port,
            self.size,
            is_master=True,
            wait_for_workers=False,
            timeout=_seconds(request),
            master_listen_fd=listener.detach(),
        )
        return {"port": port}

    def do_join(self, request: Mapping[str, Any]) -> None:
        """Become one rank of the torch.distributed world."""
        timeout = _seconds(request)
        store = self._store or dist.TCPStore(
            request["host"], request["port"], self.size, is_master=False, timeout=timeout
        )
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            MASTER_ADDR=request["host"],
            MASTER_PORT=str(request["port"]),
        )
        dist.init_process_group(
            request["backend"], store=store, rank=self.rank, world_size=self.size, timeout=timeout
        )
        self.subject = DTensorSubject(self.rank, self.device)
        expect_mpi(self.rank, self.size, store, request["host"])

    def do_define(self, request: Mapping[str, Any]) -> None:
        """Make a case of another process known under a suite's name."""
        from sbp.conform import load_case
        from sbp.suites.users import UserSuite

        case = load_case(request["data"])
        define_suite(request["name"], UserSuite(request["name"], {case.name: case}))
        self._cases.clear()

    def do_barrier(self, request: Mapping[str, Any]) -> None:
        """Meet the other ranks: proves that the world is still in step after a trial that raised."""
        dist.barrier()

    # ------------------------------------------------------------------------------------------- trials

    def do_prepare(self, request: Mapping[str, Any]) -> None:
        """Build a trial's case and reference, so that the trial itself need not."""
        self._case(Trial.from_dict(request["trial"]))

    def do_trial(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one trial. The answer holds the rows, the subject's and the harness's seconds, and the error that
        the subject raised, if any."""
        begin = time.perf_counter()
        trial = Trial.from_dict(request["trial"])
        say_trial(self.rank, trial.id)
        case = self._case(trial)
        reference = self._reference_of(trial, case)
        mesh = parse_mesh(trial.mesh)
        suite = find_suite(trial.suite)
        observed: dict[str, Observed] = {}
        self._observed, self._reference = observed, reference
        subject, expected = self._subject(trial), reference.quantities
        torch.manual_seed(stable_seed("run", trial.case) % 2**31)
        if trial.options.get("unseeded"):
            torch.seed()
        REVERSED.set(trial.options.get("reversed_on") == self.rank)
        before = state()
        error: dict[str, Any] | None = None
        # "lines" or "compare"; see sbp.inplace.in_trials.
        watch = request.get("watch")
        writes: list[dict[str, Any]] = []
        start = time.perf_counter()
        try:
            with watching(watch is not None, watch == "compare", writes):
                subject.run(
                    case.program,
                    trial.case,
                    mesh,
                    trial.placements,
                    reference.cotangents,
                    observed,
                    suite.make_optimizer(trial),
                )
        except Exception as raised:
            error = describe_error(raised, trial.dtype)
        end = time.perf_counter()
        random = case.program.random
        if isinstance(subject, ParallelSubject):
            expected = subject.comparable(expected, observed)
            random = subject.case.random
        rows = compare_all(
            observed,
            expected,
            mesh,
            self.rank,
            reached=error is None,
            random=random,
            promise=case.program.promise,
        )
        if case.program.recipe.autocast is not None:
            rows = computed_in(rows, case.program.recipe.autocast)
        answer: dict[str, Any] = {
            "rows": [row.to_list() for row in rows],
            "subject_seconds": end - start,
            "harness_seconds": time.perf_counter() - end + start - begin,
        }
        if error is not None:
            answer["error"] = error
        if writes:
            answer["writes"] = writes
        if changed := changes(before):
            answer["changed"] = changed
        return answer

    def do_details(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's pieces of the named quantities of the last trial; the first rank adds the expected values."""
        names = request["names"]
        pieces = {
            name: observed.local
            for name, observed in self._observed.items()
            if name in names and observed.local is not None
        }
        answer: dict[str, Any] = {"pieces": pieces}
        if self.rank == 0 and self._reference is not None:
            answer["expected"] = expected = {}
            for name in names:
                like = self._observed[name].like if name in self._observed else None
                due = self._reference.quantities.get(like or name)
                if due is not None and due.value is not None:
                    expected[name] = due.value
        return answer

    # ---------------------------------------------------------------------------------------- the culprit

    def do_replay(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run a trial again with every step recorded on both sides; see sbp.culprit."""
        from sbp.culprit.replay import replay

        trial = Trial.from_dict(request["trial"])
        run_reference, run_subject, subject = self._sides(trial)
        self._replay = replay(run_reference, run_subject, lambda: getattr(subject, "grid", None))
        return self._replay.answer(self.rank)

    def do_replayed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's pieces of what the last replay recorded; the first rank adds the expected values."""
        assert self._replay is not None
        return self._replay.values(request["names"], self.rank)

    def do_alone(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """One step of the last replay on the reference's inputs; None where it cannot be run so."""
        from sbp.culprit.replay import run_alone

        trial = Trial.from_dict(request["trial"])
        run_reference, run_subject, _ = self._sides(trial)
        assert self._replay is not None
        found = run_alone(
            self._replay, request["key"], run_reference, run_subject, self.rank, parse_mesh(trial.mesh)
        )
        if found is None:
            return None
        observed, expected = found
        return {
            "observed": {
                name: {"claimed": one.claimed, "mesh": one.mesh, "problem": one.problem, "shape": one.shape}
                for name, one in observed.items()
            },
            "pieces": {name: one.local for name, one in observed.items()},
            "expected": expected if self.rank == 0 else {},
        }

    def _sides(
        self, trial: Trial
    ) -> tuple[Callable[[], Any], Callable[[], Any], DTensorSubject | ParallelSubject]:
        """What runs a trial on one device and on this rank, seeded alike, and the subject."""
        case, suite, subject = self._case(trial), find_suite(trial.suite), self._subject(trial)
        seed = stable_seed("run", trial.case) % 2**31

        def run_reference() -> None:
            compute_reference(case.program, trial.case, suite.make_optimizer(trial), seed)

        def run_subject() -> None:
            torch.manual_seed(seed)
            subject.run(
                case.program,
                trial.case,
                parse_mesh(trial.mesh),
                trial.placements,
                case.reference.cotangents,
                {},
                suite.make_optimizer(trial),
            )

        return run_reference, run_subject, subject

    def _subject(self, trial: Trial) -> DTensorSubject | ParallelSubject:
        """What runs the trial: the case itself may say how it becomes parallel."""
        assert self.subject is not None
        choose = getattr(find_suite(trial.suite), "subject", None)
        own: ParallelSubject | None = choose(trial, self.rank, self.device) if choose is not None else None
        return own or self.subject

    def _case(self, trial: Trial) -> _Case:
        suite = find_suite(trial.suite)
        variant = f"{trial.suite}/{trial.case}/{trial.kind}/{sorted(trial.options.items())}/{trial.dtype}"
        kept = self._cases.get(variant)
        if kept is None:
            program = suite.build(trial.case, trial.dtype, self.device)
            seed = stable_seed("run", trial.case) % 2**31
            reference = compute_reference(program, trial.case, suite.make_optimizer(trial), seed)
            if trial.dtype == "float64" and not program.random:
                reference = with_noise_of_cancelled(
                    reference, program, trial.case, suite.make_optimizer(trial), seed
                )
            kept = _Case(program, reference)
            self._cases[variant] = kept
            if len(self._cases) > _KEPT_REFERENCES:
                self._cases.popitem(last=False)
        self._cases.move_to_end(variant)
        return kept

    def _reference_of(self, trial: Trial, case: _Case) -> Reference:
        """The case's reference; below float64 the one whose values are exact, with its noise.

        The noise is the first rank's to know; it grows with the pieces that partial inputs are added up from.
        """
        dtype = case.program.recipe.autocast or trial.dtype
        if not is_low(dtype) or case.program.random:
            return case.reference
        spread = self._spread(trial, case) if self.rank == 0 else None
        if spread not in case.low:
            case.low[spread] = low_reference(
                case.program,
                trial.case,
                dtype,
                find_suite(trial.suite).make_optimizer(trial),
                stable_seed("run", trial.case) % 2**31,
                spread,
            )
        return case.low[spread]

    def _spread(self, trial: Trial, case: _Case) -> float:
        """How much larger the pieces of partial inputs are than the inputs, to the next power of two; 1 without."""
        mesh, most = parse_mesh(trial.mesh), 1.0
        tensors = case.program.tensors()
        for name, sbp in trial.placements.items():
            if "P" not in sbp:
                continue
            full = tensors.get(name)
            if full is None and name.startswith("grad_"):
                cotangent = case.reference.cotangents.get(name.removeprefix("grad_"))
                full = torch.from_numpy(cotangent) if cotangent is not None else None
            if full is not None:
                most = max(most, spread_of_pieces(trial.case, name, full, sbp, mesh))
        return float(2.0 ** np.ceil(np.log2(most)))


def describe_error(error: BaseException, dtype: str = "") -> dict[str, Any]:
    """An exception as plain data. Its text may itself fail; that must not hide the error."""
    try:
        message = str(error)
    except Exception:
        message = "(the exception's text could not be made)"
    return {
        "type": type(error).__name__,
        "message": message[:4000],
        "traceback": "".join(traceback.format_exception(error))[-8000:],
        "refused": is_refusal(error) or lacks_kernel(error, dtype),
    }


def _seconds(request: Mapping[str, Any]) -> datetime.timedelta:
    return datetime.timedelta(seconds=request["timeout"])


def start(context: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The entry that launch calls in a freshly forked worker."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    return Worker(context.rank, context.size).handle
