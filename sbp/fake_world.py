"""The one place that touches torch's private fake process group: many ranks in one process, whose collectives move no
data. For what asks how a subject dispatches, not what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """This process as the first of ``size`` ranks, for the duration of a ``with`` block.

    Raises RuntimeError where the process is part of a world already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process is part of a torch.distributed world already")
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
