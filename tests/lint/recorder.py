"""The truth that the lint is measured against: which source lines wrote to a distributed tensor while a program ran.

A dispatch mode sees every operator above the distributed tensor's own dispatch, so what happens inside of one is not
seen. The table says which arguments an operator writes. Left out, as the watch leaves them out: torch's own
optimizers, initialisation, clipping, and the accumulation of gradients by autograd. What torch's modules write on
their own account (the statistics of a batch norm, the mask of a dropout) is a line of torch's, not of its caller's;
what they write because the caller said ``inplace=True`` is the caller's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sbp.inplace import table

KNOWN = ("/torch/optim/", "/torch/nn/init.py", "/torch/nn/utils/clip_grad.py", "/torch/autograd/graph.py")
QUIET_GROUPS = ("harmless",)


def flat_tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in an argument, which may be a list of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_tensors(item)


class _Assignments(TorchFunctionMode):
    """``x.data = t`` reaches no operator, but a function mode."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__ and self.recorder.counts(args[0]):
            self.recorder.record()
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Collects ``(file, line)`` of every write to a distributed tensor, or to its local piece, in some files.

    With ``any_tensor`` it collects the writes to plain tensors too: what would be written to if it were distributed.
    """

    def __init__(self, files: Iterable[Path], any_tensor: bool = False) -> None:
        super().__init__()
        self.any_tensor = any_tensor
        self.files = {str(path.resolve()) for path in files}
        self.lines: set[tuple[str, int]] = set()
        self.pieces: dict[int, torch.UntypedStorage] = {}
        self.assignments = _Assignments(self)

    def __enter__(self) -> Recorder:
        super().__enter__()
        self.assignments.__enter__()
        self.make = DTensor.__new__

        def make(*args: Any, **kwargs: Any) -> DTensor:
            made: DTensor = self.make(*args, **kwargs)
            self.remember([made])
            return made

        DTensor.__new__ = make  # type: ignore[method-assign,assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        DTensor.__new__ = self.make  # type: ignore[method-assign]
        self.assignments.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def record(self) -> None:
        """Take the innermost line of the linted files, unless torch writes for its own purposes below it."""
        frame = sys._getframe(1)
        asked = False
        while frame is not None:
            name = frame.f_code.co_filename
            if name in self.files:
                self.lines.add((name, frame.f_lineno))
                return
            asked = asked or frame.f_locals.get("inplace") is True
            if any(part in name for part in KNOWN) or ("/torch/nn/" in name and not asked):
                return
            frame = frame.f_back  # type: ignore[assignment]

    def remember(self, values: Iterable[torch.Tensor]) -> None:
        """Keep the memory of local pieces, to know it when it is written directly. Kept alive, so that its
        address is not given to another tensor."""
        for tensor in values:
            if isinstance(tensor, DTensor):
                storage = tensor._local_tensor.untyped_storage()
                self.pieces[storage.data_ptr()] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.remember(flat_tensors([*args, *kwargs.values()]))
        entry = table.operator(str(func))
        if entry is not None and entry.group not in QUIET_GROUPS:
            schema = func._schema.arguments
            given = {argument.name: value for argument, value in zip(schema, args)} | kwargs
            written = [tensor for name in entry.writes for tensor in flat_tensors(given.get(name))]
            if any(self.counts(tensor) for tensor in written):
                self.record()
        result = func(*args, **kwargs)
        self.remember(flat_tensors(result))
        return result

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a write to this tensor is recorded."""
        return self.any_tensor or isinstance(tensor, DTensor) or self.is_piece(tensor)

    def is_piece(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor lies in the memory of a distributed tensor's local piece."""
        return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in self.pieces
