"""What a case may change in its process that would reach the cases after it.

A worker whose state was changed is not mended but replaced: a fresh fork costs less than a second and has no past.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as torch_modules
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
    "_global_buffer_registration_hooks",
)


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _world() -> int | None:
    return id(dist.group.WORLD) if dist.is_initialized() else None


def _output() -> tuple[bool, ...]:
    """Whether standard output and error are still open."""
    found = []
    for number in (1, 2):
        try:
            os.fstat(number)
            found.append(True)
        except OSError:
            found.append(False)
    return tuple(found)


_PARTS: Mapping[str, Callable[[], Any]] = {
    "the current directory": _directory,
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "the number of threads": torch.get_num_threads,
    "whether gradients are recorded": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "hooks of all modules": lambda: [len(getattr(torch_modules, name, ())) for name in _HOOKS],
    "modes of torch functions": _len_torch_function_stack,
    "modes of torch's dispatch": _len_torch_dispatch_stack,
    "the process group": _world,
    "signal handlers": lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    "limits of the process": lambda: [
        resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
    ],
    "the recursion limit": sys.getrecursionlimit,
    "garbage collection": gc.isenabled,
    "profiling or tracing": lambda: (sys.getprofile(), sys.gettrace()),
    "standard output": lambda: (_output(), sys.stdout, sys.stderr),
    "running threads": lambda: sum(not thread.daemon for thread in threading.enumerate()),
}


def state() -> dict[str, Any]:
    """The state as it is now, by name."""
    return {name: read() for name, read in _PARTS.items()}


def changes(before: Mapping[str, Any]) -> list[str]:
    """The names of what is not as it was in ``before``, a result of :func:`state`."""
    return [name for name, value in state().items() if value != before[name]]
