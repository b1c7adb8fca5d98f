"""launch: ranks as processes. Finds or starts them, keeps a worker alive for each, notices hangs and deaths.

Every rank is a light supervisor (MPI, no torch) with a worker process; rank 0 leads. See :func:`start`.
"""

from launch.job import Job, JobError, RankInfo, Reply, start
from launch.ranks import LaunchError, inside_job, is_first_rank
from launch.spawn import spawn
from launch.supervisor import Settings, Side, SideError
from launch.worker import WorkerContext

__all__ = [
    "Job",
    "JobError",
    "LaunchError",
    "RankInfo",
    "Reply",
    "Settings",
    "Side",
    "SideError",
    "WorkerContext",
    "inside_job",
    "is_first_rank",
    "spawn",
    "start",
]
