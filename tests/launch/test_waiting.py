"""Whether a worker waits for other ranks, by its stack."""

from __future__ import annotations

from launch import Settings
from launch.job import _waits_in
from sbp.lead import PASSING

# As faulthandler writes it: a collective of hand-written code while a trial is watched.
WATCHED = """\
Thread 0x00007f54e0000700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f54ef21ab80 (most recent call first):
  File "/venv/site-packages/torch/_ops.py", line 1095 in __call__
  File "/code/sbp/inplace/watch.py", line 181 in __torch_dispatch__
  File "/venv/site-packages/torch/_dynamo/eval_frame.py", line 1446 in _fn
  File "/venv/site-packages/torch/_compile.py", line 54 in inner
  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 5349 in barrier
  File "/venv/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/cases.py", line 7 in forward
"""
COMPUTES = """\
Current thread 0x00007f54ef21ab80 (most recent call first):
  File "/venv/site-packages/torch/_ops.py", line 1095 in __call__
  File "/code/sbp/inplace/watch.py", line 181 in __torch_dispatch__
  File "/home/me/kernels.py", line 4 in inner
  File "/home/me/kernels.py", line 9 in outer
  File "/home/me/cases.py", line 5 in step
  File "/home/me/cases.py", line 7 in forward
  File "/venv/site-packages/torch/distributed/fsdp/hooks.py", line 3 in call
"""


def test_the_frames_of_a_watch_do_not_hide_a_collective() -> None:
    waiting = Settings.waiting_files
    assert _waits_in(WATCHED, waiting, PASSING)
    assert not _waits_in(WATCHED, waiting)  # what the names that are passed through are for
    assert not _waits_in(COMPUTES, waiting, PASSING)
    assert not _waits_in("", waiting, PASSING)
