"""A handler that does what it is told, however bad; and the job that tells it (run under mpirun)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch


class Unprintable(Exception):
    """Its text cannot be made, and it cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")


def start(context: launch.WorkerContext) -> Callable[[Any], Any]:
    def handle(request: dict[str, Any]) -> Any:
        if context.rank in request.get("ranks", [context.rank]):
            return misbehave(request["how"], context)
        if request.get("others") == "wait":
            wait_in_a_collective()
        return answer(context)

    return handle


def answer(context: launch.WorkerContext) -> dict[str, Any]:
    return {"rank": context.rank, "pid": os.getpid(), "hash": hash("a word"), "world": context.world_number}


def wait_in_a_collective() -> None:
    """Waits for ever, in a frame that looks like torch.distributed's."""
    waiting = "import threading\nthreading.Event().wait()"
    code = compile(waiting, "/somewhere/torch/distributed/collectives.py", "exec")
    exec(code, {})


def misbehave(how: str, context: launch.WorkerContext) -> Any:
    if how == "raise":
        raise ValueError("this rank raises")
    if how == "unprintable":
        raise Unprintable
    if how == "sys.exit":
        sys.exit(3)
    if how == "keyboard interrupt":
        raise KeyboardInterrupt
    if how == "os._exit":
        os._exit(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
    if how == "stopped for a while":
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(1.5)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
    if how == "loop in Python":
        while True:
            pass
    if how == "sleep in C":
        ctypes.CDLL(None).sleep(1000)
    if how == "slow":
        time.sleep(1.5)
    if how == "wait in a collective":
        wait_in_a_collective()
    if how == "unsendable":
        return object()
    if how == "print much":
        for _ in range(100):
            print("x" * (1 << 20))
    if how == "close stdout":
        os.close(1)
        os.close(2)
    if how == "who":
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        return {"host": context.host, "local_rank": context.local_rank, "interface": interface}
    if how == "child process":
        if os.fork() == 0:
            time.sleep(1000)
        return os.getpid()
    return answer(context)


def lead(requests: list[dict[str, Any]], timeout: float, output: str) -> int:
    """Send the requests one after another and print what became of each as a line of JSON."""
    settings = launch.Settings(
        "misbehaving:start",
        ("json",),
        environment={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        output_directory=output,
        grace=0.5,
    )
    job = launch.start(settings)
    if isinstance(job, int):
        return job
    for request in requests:
        begin = time.monotonic()
        if request["how"] == "leave":
            raise RuntimeError("an error of the leading rank itself")
        replies = job.call(request, timeout)
        line = {
            "seconds": time.monotonic() - begin,
            "replies": [
                {name: getattr(reply, name) for name in ("status", "value", "error", "message", "stack")}
                for reply in replies
            ],
        }
        print(json.dumps(line), flush=True)
    job.close()
    return 0


def lead_worlds(ranks_per_world: int, trials: int, output: str) -> int:
    """Have the worlds take numbered requests from one counter; the first prints what each found."""
    settings = launch.Settings(
        "misbehaving:start",
        ("json",),
        environment={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        output_directory=output,
    )
    job = launch.start(settings, ranks_per_world)
    if isinstance(job, int):
        return job
    worlds = job.worlds
    assert worlds is not None
    shared = worlds.share(b"shared" if worlds.index == 0 else None)
    lines: list[dict[str, Any]] = []
    begin = time.monotonic()
    while (ticket := worlds.next_ticket()) is not None and ticket < trials:
        # One of them costs its world its workers.
        how = {"how": "SIGKILL", "ranks": [1]} if ticket == 3 else {"how": "nothing"}
        replies = job.call(how, 10)
        line = {"ticket": ticket, "world": worlds.index, "shared": shared.decode(), "size": job.size}
        line["statuses"] = [reply.status for reply in replies]
        line["hashes"] = [reply.value["hash"] for reply in replies if reply.status == "ok"]
        worlds.forward(json.dumps(line).encode())
    if worlds.index == 0:
        while len(lines) < trials and time.monotonic() < begin + 60:
            lines += [json.loads(data) for _, data in worlds.collected()]
            time.sleep(0.001)
        for line in lines:
            print(json.dumps(line))
        print(json.dumps({"seconds": time.monotonic() - begin}))
    job.close()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "worlds":
        sys.exit(lead_worlds(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    sys.exit(lead(json.loads(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
