"""What runs inside each rank's worker process for ``sbp speed``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sbp.speed.count import count_step
from sbp.speed.models import CASES, build, draw, find_plan, reason_to_skip
from sbp.speed.report import SINGLE
from sbp.worker import Worker


class Variant:
    """One model with its inputs, whole or split."""

    def __init__(self, module: nn.Module, inputs: Tensor) -> None:
        self.module = module
        self.inputs = inputs

    def step(self) -> Tensor:
        """Forward and backward; returns the loss without waiting for it."""
        loss: Tensor = self.module(self.inputs).float().square().mean()
        loss.backward()
        return loss.detach()

    def forget(self) -> None:
        """Drop the gradients, as an optimizer does."""
        self.module.zero_grad(set_to_none=True)

    def held(self) -> list[Tensor]:
        """The tensors that are there before a step."""
        return [*self.module.parameters(), *self.module.buffers(), self.inputs]


class SpeedWorker(Worker):
    """One rank; the world is made as for trials."""

    def __init__(self, rank: int, size: int, local_rank: int) -> None:
        super().__init__(rank, size)
        self.local_rank = local_rank
        self.mesh: DeviceMesh | None = None

    def do_gpus(self, request: Mapping[str, Any]) -> int:
        """How many GPUs there are for the ranks of this host."""
        return torch.cuda.device_count()

    def do_speed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Time one case at one batch size on one device (the first rank's) and under the plans, in turns.

        ``measured`` of the answer has for each of them this rank's seconds of every round, and what a step does; None
        for the single device on ranks that only wait for it. ``skipped`` has the plans that do not fit, and why.
        """
        case = CASES[request["case"]]
        reasons = {name: reason_to_skip(case, name, request["scale"], self.size) for name in request["plans"]}
        skipped = {name: reason for name, reason in reasons.items() if reason}
        torch.set_num_threads(request["threads"])
        device = self._device(request["device"])
        if self.mesh is None:
            self.mesh = init_device_mesh(device.type, (self.size,))
        variants = self._variants(request, device, [name for name in request["plans"] if name not in skipped])
        answers: dict[str, Any] = {}
        for _ in range(request["warm_up"]):
            for variant in variants.values():
                self._timed(variant, device)
        for name, variant in variants.items():
            answers[name] = None if variant is None else self._counted(variant, device)
            dist.barrier()
        order = list(variants)
        for _ in range(request["rounds"]):
            for name in order:
                seconds = self._timed(variants[name], device)
                if answers[name] is not None:
                    answers[name]["seconds"].append(seconds)
            order.reverse()  # so that none always comes after the same other
        return {"measured": answers, "skipped": skipped}

    def _device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device("cpu")
        device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def _variants(
        self, request: Mapping[str, Any], device: torch.device, plans: Sequence[str]
    ) -> dict[str, Variant | None]:
        assert self.mesh is not None
        case, scale = CASES[request["case"]], request["scale"]
        dtype = getattr(torch, request["dtype"])
        inputs = draw(case, scale, request["batch"], dtype, device)
        alone = Variant(build(case, scale, dtype, device), inputs) if self.rank == 0 else None
        variants: dict[str, Variant | None] = {SINGLE: alone}
        for name in plans:
            plan, split = find_plan(case, name)
            module = plan(build(case, scale, dtype, device), self.mesh)
            mine = inputs.chunk(self.size)[self.rank].clone() if split else inputs
            variants[name] = Variant(module, mine)
        return variants

    def _timed(self, variant: Variant | None, device: torch.device) -> float:
        """The seconds of one step, begun by all ranks together."""
        if variant is not None:
            variant.forget()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        if variant is None:
            return 0.0
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            variant.step()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1000
        start = time.perf_counter()
        variant.step()
        return time.perf_counter() - start

    def _counted(self, variant: Variant, device: torch.device) -> dict[str, Any]:
        variant.forget()
        losses: list[float] = []
        counter = count_step(lambda: losses.append(float(variant.step())), variant.held(), device)
        variant.forget()
        return {
            "seconds": [],
            "collectives": dict(counter.collectives),
            "collective_bytes": counter.collective_bytes,
            "peak_bytes": counter.peak_bytes,
            "loss": losses[0],
        }


def start(context: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The entry that launch calls in a freshly forked worker."""
    return SpeedWorker(context.rank, context.size, context.local_rank).handle
