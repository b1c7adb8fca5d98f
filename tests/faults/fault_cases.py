"""Cases that break the process that runs them, each in its own way, and a good one after each.

``SBP_FAULTS=off`` in the environment turns the faults off: then all are good cases.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import sbp.worker
from sbp import Case, case

RANKS = 4
FAULTY = os.environ.get("SBP_FAULTS") != "off"


class CannotBePickled(Exception):
    def __init__(self) -> None:
        super().__init__("not by pickle")
        self.lock = threading.Lock()

    def __reduce__(self) -> str:
        raise TypeError("this exception cannot be pickled")


class CannotBePrinted(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def throw(error: BaseException) -> Callable[[], None]:
    def thrower() -> None:
        raise error

    return thrower


def read_address_zero() -> None:
    ctypes.string_at(0)


def loop_in_python() -> None:
    while True:
        pass


def loop_in_c() -> None:
    # Backtracks for longer than the universe is old, and holds the interpreter all the while.
    re.match(r"(a+)+$", "a" * 60 + "b")


def stop_for_a_second() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def be_slow() -> None:
    time.sleep(1.5)


def many_threads() -> None:
    def spread() -> None:
        time.sleep(0.2)

    for _ in range(2000):
        threading.Thread(target=spread, daemon=True).start()


def use_up_memory() -> None:
    # Another 256 MB is all that this process may have.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    torch.ones(1 << 30)


def print_much() -> None:
    line = "x" * 1023
    for _ in range(100 << 10):
        print(line)


def recurse() -> None:
    recurse()


def close_the_connection() -> None:
    os.closerange(3, 256)


def leave_a_process() -> None:
    # In a session of its own, so that no signal to the worker's group reaches it.
    subprocess.Popen(["sleep", "61.25"], start_new_session=True)


class Twice(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.Tensor.mul else result


def leave_a_mode() -> None:
    Twice().__enter__()


def leave_a_hook() -> None:
    nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)


def collective(**differs: Any) -> Callable[[], None]:
    """An all-reduce that is another one on this rank."""

    def run() -> None:
        tensor = torch.ones(differs.get("size", 4), dtype=differs.get("dtype", torch.float64))
        dist.all_reduce(tensor, differs.get("op", dist.ReduceOp.SUM))

    return run


def right_collective() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64))


def two_collectives() -> None:
    dist.broadcast(torch.ones(4, dtype=torch.float64), 0)
    dist.all_reduce(torch.ones(4, dtype=torch.float64))


def two_collectives_in_another_order() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64))
    dist.broadcast(torch.ones(4, dtype=torch.float64), 0)


def in_comparison(fault: Callable[[], None]) -> Callable[[], None]:
    """Has the worker's comparison of this trial meet the fault."""

    def plant() -> None:
        original = sbp.worker.compare_all

        def broken(*args: Any, **kwargs: Any) -> Any:
            sbp.worker.compare_all = original
            fault()
            return original(*args, **kwargs)

        sbp.worker.compare_all = broken

    return plant


def nothing() -> None:
    """Nothing at all."""


# Name -> what happens on one rank, what all others do there, and the verdicts that are right.
# "forward" faults happen in the forward pass of the distributed side, "backward" ones in its backward pass.
Fault = tuple[str, Callable[[], None], Callable[[], None], set[str]]
CRASH, ERROR, HANG = {"crash"}, {"error"}, {"hang"}
# Ranks that are not in step may be found out by torch's own check of collectives, by the proof of a deadlock or by the
# deadline; which of these is first does not matter.
OUT_OF_STEP = {"ranks disagree", "hang", "error"}
FAULTS: dict[str, Fault] = {
    "sigkill": ("forward", send(signal.SIGKILL), nothing, CRASH),
    "sigkill_backward": ("backward", send(signal.SIGKILL), nothing, CRASH),
    "sigkill_while_others_wait": ("forward", send(signal.SIGKILL), right_collective, CRASH),
    "sigkill_in_comparison": ("forward", in_comparison(send(signal.SIGKILL)), nothing, CRASH),
    "sigterm": ("forward", send(signal.SIGTERM), nothing, CRASH),
    "sigsegv": ("forward", read_address_zero, nothing, CRASH),
    "sigsegv_backward": ("backward", read_address_zero, nothing, CRASH),
    "sigabrt": ("forward", os.abort, nothing, CRASH),
    "sigfpe": ("backward", send(signal.SIGFPE), nothing, CRASH),
    "exit_0": ("forward", lambda: os._exit(0), nothing, CRASH),
    "exit_0_backward": ("backward", lambda: os._exit(0), nothing, CRASH),
    "exit_0_in_comparison": ("forward", in_comparison(lambda: os._exit(0)), nothing, CRASH),
    "exit_7": ("forward", lambda: os._exit(7), right_collective, CRASH),
    "raises": ("forward", throw(ValueError("on one rank")), nothing, ERROR),
    "raises_backward": ("backward", throw(ValueError("on one rank")), nothing, ERROR),
    "raises_while_others_wait": ("forward", throw(ValueError("on one rank")), right_collective, ERROR),
    "raises_in_comparison": ("forward", in_comparison(throw(ValueError("in comparison"))), nothing, ERROR),
    "raises_unpicklable": ("forward", throw(CannotBePickled()), nothing, ERROR),
    "raises_unprintable": ("forward", throw(CannotBePrinted()), nothing, ERROR),
    "raises_a_long_text": ("forward", throw(ValueError("long " * (4 << 20))), nothing, ERROR),
    "sys_exit": ("forward", throw(SystemExit(0)), nothing, ERROR),
    "keyboard_interrupt": ("forward", throw(KeyboardInterrupt()), nothing, ERROR),
    "recursion": ("forward", recurse, nothing, ERROR),
    "out_of_memory": ("forward", use_up_memory, nothing, {"error", "crash"}),
    "loop_in_python": ("forward", loop_in_python, nothing, HANG),
    "loop_in_python_backward": ("backward", loop_in_python, nothing, HANG),
    "loop_in_c": ("forward", loop_in_c, nothing, HANG),
    "loop_in_comparison": ("forward", in_comparison(loop_in_python), nothing, HANG),
    "stopped_for_good": ("forward", send(signal.SIGSTOP), nothing, HANG),
    "connection_closed": ("forward", close_the_connection, nothing, {"crash", "hang", "error"}),
    "missing_collective": ("forward", nothing, right_collective, OUT_OF_STEP),
    "another_size": ("forward", collective(size=5), right_collective, OUT_OF_STEP),
    "another_dtype": ("forward", collective(dtype=torch.float32), right_collective, OUT_OF_STEP),
    "another_operation": ("forward", lambda: dist.broadcast(torch.ones(4), 0), right_collective, OUT_OF_STEP),
    "another_order": ("forward", two_collectives_in_another_order, two_collectives, OUT_OF_STEP),
    # These change nothing about the result: what they leave behind must not reach the next case.
    "stopped_for_a_second": ("forward", stop_for_a_second, nothing, {"pass"}),
    "slow": ("forward", be_slow, nothing, {"pass"}),
    "slow_while_others_wait": (
        "forward",
        lambda: (be_slow(), right_collective())[0],
        right_collective,
        {"pass"},
    ),
    "many_threads": ("forward", many_threads, nothing, {"pass", "error"}),
    "prints_100_MB": ("forward", print_much, nothing, {"pass"}),
    "changes_directory": ("forward", lambda: os.chdir("/"), nothing, {"pass"}),
    "changes_seed": ("forward", lambda: torch.manual_seed(1) and None, nothing, {"pass"}),
    "changes_default_dtype": ("backward", lambda: torch.set_default_dtype(torch.float16), nothing, {"pass"}),
    "changes_threads": ("forward", lambda: torch.set_num_threads(3), nothing, {"pass"}),
    "turns_gradients_off": ("backward", lambda: torch.set_grad_enabled(False) and None, nothing, {"pass"}),
    "turns_collection_off": ("forward", gc.disable, nothing, {"pass"}),
    "ignores_sigterm": (
        "forward",
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN) and None,
        nothing,
        {"pass"},
    ),
    "closes_stdout": ("forward", lambda: os.close(1), nothing, {"pass"}),
    "replaces_stdout": ("forward", lambda: setattr(sys, "stdout", None), nothing, {"pass"}),
    "leaves_a_hook": ("backward", leave_a_hook, nothing, {"pass"}),
    "leaves_a_mode": ("backward", leave_a_mode, nothing, {"pass"}),
    "leaves_a_process": ("forward", leave_a_process, nothing, {"pass"}),
    "destroys_the_group": ("backward", dist.destroy_process_group, nothing, {"pass", "error"}),
}


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, input: torch.Tensor, fault: Callable[[], None]) -> torch.Tensor:
        context.fault = fault
        return input.view_as(input)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.fault()
        return gradient, None


class Faulty(nn.Module):
    """Twice its input; on the distributed side, a rank does something bad on the way."""

    def __init__(self, where: str, fault: Callable[[], None], others: Callable[[], None], rank: int) -> None:
        super().__init__()
        self.where, self.fault, self.others, self.rank = where, fault, others, rank

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not FAULTY or not isinstance(input, DTensor):
            return input * 2
        act = self.fault if dist.get_rank() == self.rank else self.others
        if self.where == "backward":
            return _InBackward.apply(input, act) * 2
        act()
        return input * 2


def cases() -> Iterator[tuple[str, nn.Module]]:
    for number, (name, (where, fault, others, _)) in enumerate(FAULTS.items()):
        yield name, Faulty(where, fault, others, number % RANKS)
        yield f"after_{name}", Faulty("forward", nothing, nothing, 0)


def define(name: str, module: nn.Module) -> Case:
    def make() -> tuple[nn.Module, torch.Tensor]:
        return module, torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    return case(name=name)(make)


ALL = [define(name, module) for name, module in cases()]
