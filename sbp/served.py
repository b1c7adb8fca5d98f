"""Ranks that serve one process: started by :class:`sbp.ranks.Ranks`, they run the trials that it sends.

``python -m sbp.served RANKS SOCKET TIMEOUT SEED`` starts the ranks; the first of them connects to the Unix socket and
answers until that is closed. Like ``sbp.run``, this process imports no torch.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Any

import launch
from launch.wire import Connection, ConnectionClosed
from sbp.lead import PASSING, PRELOAD, run_command
from sbp.session import Session, WorldError
from sbp.trial import Trial


def main(argv: Sequence[str]) -> int:
    """Start the ranks, or be one of them; the exit code."""
    ranks, path, timeout, seed = int(argv[0]), argv[1], float(argv[2]), int(argv[3])
    if not launch.inside_job():
        return launch.spawn(ranks, ["-m", "sbp.served", *argv])
    job = launch.start(
        launch.Settings(entry="sbp.worker:start", preload=PRELOAD, seed=seed, passing_files=PASSING)
    )
    if isinstance(job, int):
        return job
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            serve(Connection(sock), job, timeout)
    except (ConnectionClosed, ConnectionError):
        return 0  # whoever wanted the ranks has gone
    finally:
        job.close()
    return 0


def serve(connection: Connection, job: Any, timeout: float) -> None:
    """Answer requests until the other end closes the connection.

    ``{"trial": ...}`` gives the verdict's record; ``{"define": name, "data": bytes}`` makes a suite known to all ranks,
    now and in every later world.
    """
    definitions: dict[str, bytes] = {}
    session = Session(job, timeout)
    make_world = job.on_new_world

    def on_new_world(world: Any) -> None:
        make_world(world)
        for name, data in definitions.items():
            define(name, data)

    def define(name: str, data: bytes) -> str:
        replies = job.call({"do": "define", "name": name, "data": data}, 120)
        problems = [reply.message or reply.status for reply in replies if reply.status != "ok"]
        return problems[0] if problems else ""

    job.on_new_world = on_new_world
    connection.send({"ready": job.size, "launcher": job.launcher})
    while True:
        request = connection.receive()
        try:
            if "define" in request:
                # Only the latest is kept: what came before belongs to a call that is over.
                definitions.clear()
                definitions[request["define"]] = request["data"]
                connection.send({"problem": define(request["define"], request["data"])})
            else:
                trial = Trial.from_dict(request["trial"])
                connection.send(session.run(trial).to_dict(run_command(trial, job.size)))
        except (WorldError, launch.JobError) as error:
            connection.send({"fatal": str(error)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
