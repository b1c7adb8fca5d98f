"""``--rank-logs DIR``: what the cases print, out of the way, in a file for each rank."""

from __future__ import annotations

import os
from dataclasses import replace

import launch
from sbp.escape import one_line
from sbp.usage import UsageError

# Tells the workers to say which trial begins; what follows in their files is that trial's.
VARIABLE = "SBP_RANK_LOGS"


def with_rank_logs(settings: launch.Settings, directory: str) -> launch.Settings:
    """Settings under which each rank's workers write into ``rank<N>.log`` in ``directory``, which is made.

    Raises UsageError where it cannot be.
    """
    path = os.path.abspath(directory)
    try:
        os.makedirs(path, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
        taken = [name for name in os.listdir(path) if name.startswith("rank") and not _is_file(path, name)]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--rank-logs {one_line(directory)}: {reason}; name a folder") from error
    if not writable:
        raise UsageError(
            f"--rank-logs {one_line(directory)}: nothing can be written there; name another folder"
        )
    if taken:
        raise UsageError(
            f"--rank-logs {one_line(directory)}: {one_line(taken[0])} in it is no file; name another folder"
        )
    return replace(settings, output_directory=path, environment={**settings.environment, VARIABLE: "yes"})


def _is_file(directory: str, name: str) -> bool:
    return os.path.isfile(os.path.join(directory, name))


def say_trial(rank: int, trial: str) -> None:
    """In a worker, before a trial: its heading in the rank's file, where there is one."""
    if VARIABLE in os.environ:
        print(f"[rank {rank}] {one_line(trial)}", flush=True)
