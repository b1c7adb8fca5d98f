"""Runs scripts quickly: each rank is a process that has torch imported and forks for every script.

For the many tries that it takes to find and to shrink a script; what is given out has run under torchrun besides.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sbp.repro.verify import Outcome

# Once a rank has failed the others get so long, in seconds; torchrun ends them likewise.
_GRACE = 1.0
_PAUSE = 0.01
_KEPT_OUTPUT = 1 << 20


class WarmRanks:
    """Processes that run scripts as ranks.

    Args:
        seeds: PYTHONHASHSEED of each rank; as many as a script may have.

    Raises OSError where they cannot be started.
    """

    def __init__(self, seeds: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sbp-repro-")
        self._ranks: list[subprocess.Popen[bytes]] = []
        for seed in seeds:
            environment = {
                **os.environ,
                "PYTHONHASHSEED": seed,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "sbp.repro.warm"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    # Control-C is for the command, which then ends them.
                    start_new_session=True,
                )
            )

    def run(self, source: str, name: str, count: int, timeout: float) -> Outcome:
        """Run a script's text on the first ``count`` of the ranks; it is ended after ``timeout`` seconds."""
        path = Path(self._folder.name) / name
        path.write_text(source, encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        outputs = [Path(self._folder.name) / f"rank{rank}.txt" for rank in range(count)]
        children = [
            self._ask(
                rank,
                {"path": str(path), "output": str(outputs[rank]), "size": count, "rank": rank, "port": port},
            )
            for rank in range(count)
        ]
        codes = self._wait(children, timeout)
        texts = [f"{file.read_bytes()[-_KEPT_OUTPUT:].decode(errors='replace')}\n" for file in outputs]
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                texts.append(f"rank {rank}: ended by {signal.Signals(-code).name}\n")
        own = [code for code in codes if code is not None]
        failed = next((code for code in own if code), 0)
        return Outcome("".join(texts), failed if own and (failed or len(own) == count) else None)

    def _wait(self, children: list[int], timeout: float) -> list[int | None]:
        """The exit codes; None for a rank that did not end by itself."""
        codes: list[int | None] = [None] * len(children)
        ended_by_us: set[int] = set()
        deadline = time.monotonic() + timeout
        while True:
            alive = [rank for rank, code in enumerate(codes) if code is None]
            for rank in alive:
                codes[rank] = self._ask(rank, {"child": children[rank]})
            if all(code is not None for code in codes):
                return [None if rank in ended_by_us else code for rank, code in enumerate(codes)]
            now = time.monotonic()
            if any(codes):
                deadline = min(deadline, now + _GRACE)
            if now > deadline:
                for rank in alive:
                    if codes[rank] is None and rank not in ended_by_us:
                        ended_by_us.add(rank)
                        os.killpg(children[rank], signal.SIGKILL)
            time.sleep(_PAUSE)

    def _ask(self, rank: int, question: dict[str, Any]) -> Any:
        process = self._ranks[rank]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise OSError("a process that runs scripts ended")
        return json.loads(answer)

    def close(self) -> None:
        for process in self._ranks:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._folder.cleanup()


def _serve() -> None:
    """Answer questions until there are no more: start a script, or say how one ended."""
    import torch.distributed.tensor  # noqa: F401

    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    children: set[int] = set()
    for line in sys.stdin.buffer:
        question = json.loads(line)
        if "child" not in question:
            child = os.fork()
            if child == 0:
                _become_rank(question)
            children.add(child)
            answers.write(f"{child}\n".encode())
            continue
        child, status = os.waitpid(question["child"], os.WNOHANG)
        children.discard(child)
        answers.write(json.dumps(os.waitstatus_to_exitcode(status) if child else None).encode() + b"\n")
    for child in children:
        os.killpg(child, signal.SIGKILL)


def _become_rank(question: dict[str, Any]) -> NoReturn:
    """Run the script as one rank, in this process, and end it."""
    os.setsid()
    file = os.open(question["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    rank, size = str(question["rank"]), str(question["size"])
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(question["port"]))
    code = 0
    try:
        runpy.run_path(question["path"], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
