"""What looks like a write to a distributed tensor and may be none."""

from __future__ import annotations

from sbp.inplace.lint.config import Configuration
from sbp.inplace.lint.files import lint_text

COPY = """
import torch.distributed as dist

def share(tensor, mesh, group):
    local = tensor.to_local()
    {line}
    dist.broadcast(sent, src=0, group=group)
"""
FUSE = """
import torch
from torch import nn
from somewhere import act, fuse

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {line}
"""


def codes(text: str) -> list[tuple[str, str]]:
    return [(one.code, one.level) for one in lint_text(text, "net.py", Configuration()).findings]


def test_a_local_piece_on_another_device_is_no_local_piece() -> None:
    assert codes(COPY.format(line="sent = local.to(device=mesh.device_type)")) == []
    assert codes(COPY.format(line="sent = local.view(-1)")) == [("SBP108", "certain")]


def test_inplace_of_what_works_on_modules_is_no_write() -> None:
    assert codes(FUSE.format(line='fuse(self, ["conv", "relu"], inplace=True)')) == []
    assert codes(FUSE.format(line="self.act = act(inplace=True)")) == [("SBP103", "likely")]
