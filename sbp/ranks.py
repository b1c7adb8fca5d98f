"""Ranks for a process that is none of them itself: a test session, a notebook, a script.

:class:`Ranks` starts a job of its own behind the scenes, keeps it warm, and has trials run on it. No torch is needed
here.
"""

from __future__ import annotations

import atexit
import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launch.folder import PrivateFolder, remove_left_behind
from launch.process import worker_environment
from launch.wire import Connection, ConnectionClosed
from sbp.trial import Trial

# How long the ranks may take to start: each imports torch.
_START = 300.0
# What a trial may take beyond its deadline: building the case, making a new world, trying a second time.
_SLACK = 600.0


class RanksError(RuntimeError):
    """The ranks could not be started, or ended; says why."""


class Ranks:
    """A job of ranks that serves this process.

    Args:
        size: how many.
        timeout: each trial's deadline in seconds.
        seed: of the ranks' hash seeds.

    Nothing is started before the first trial. Raises RanksError from :meth:`run` and :meth:`define`.
    """

    def __init__(self, size: int, timeout: float = 60.0, seed: int = 0) -> None:
        self.size = size
        self.timeout = timeout
        self.seed = seed
        self._folder: PrivateFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = os.getpid()

    def run(self, trial: Trial) -> dict[str, Any]:
        """Run one trial; its verdict as in a results file."""
        return self._ask({"trial": trial.to_dict()})

    def define(self, name: str, data: bytes) -> None:
        """Make a suite known to the ranks under ``name``; see :mod:`sbp.conform`."""
        problem = self._ask({"define": name, "data": data})["problem"]
        if problem:
            raise RanksError(f"the ranks cannot load it: {problem}")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(request)
            answer = self._connection.receive(2 * self.timeout + _SLACK)
        except ConnectionClosed:
            raise self._failed("the ranks ended") from None
        except BaseException:
            self.close()  # interrupted in between: what comes next would be the answer to this
            raise
        if answer is None:
            raise self._failed("the ranks do not answer")
        if "fatal" in answer:
            raise self._failed(answer["fatal"])
        result: dict[str, Any] = answer
        return result

    def _start(self) -> None:
        remove_left_behind()
        self._folder = PrivateFolder()
        path = self._inside("socket")
        environment = worker_environment({"PYTHONPATH": _python_path()})
        with socket.socket(socket.AF_UNIX) as listener, open(self._inside("log"), "wb") as log:
            listener.bind(path)
            listener.listen(1)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sbp.served"),
                    *(str(self.size), path, str(self.timeout), str(self.seed)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which then closes the ranks
            )
            atexit.register(self.close)
            listener.settimeout(0.2)
            end = time.monotonic() + _START
            while self._connection is None:
                try:
                    self._connection = Connection(listener.accept()[0])
                except TimeoutError:
                    if self._process.poll() is not None or time.monotonic() > end:
                        raise self._failed(f"{self.size} ranks could not be started") from None
        self._connection.socket.setblocking(True)
        if self._connection.receive(60.0) is None:
            raise self._failed("the ranks do not answer")

    def _inside(self, name: str) -> str:
        return os.path.join(self._folder.path if self._folder is not None else "", name)

    def _failed(self, what: str) -> RanksError:
        """The error with the last line that the ranks printed; closes them."""
        try:
            lines = Path(self._inside("log")).read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        self.close()
        return RanksError(f"{what}: {lines[-1]}" if lines else what)

    def close(self) -> None:
        """End the ranks; the next trial starts new ones."""
        if self._owner != os.getpid():  # a fork of the process that they belong to
            return
        atexit.unregister(self.close)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            for stop in (lambda: None, self._process.terminate, self._process.kill):
                stop()
                try:
                    self._process.wait(5.0)
                    break
                except subprocess.TimeoutExpired:
                    continue
            self._process = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _python_path() -> str:
    """This process's import path, so that the ranks find the same modules."""
    return os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))


_kept: dict[tuple[int, float], Ranks] = {}


def shared_ranks(size: int, timeout: float = 60.0) -> Ranks:
    """Ranks of that number, kept warm until this process ends."""
    key = size, timeout
    if key not in _kept or _kept[key]._owner != os.getpid():
        _kept[key] = Ranks(size, timeout)
    return _kept[key]


def close_shared_ranks() -> None:
    """End all ranks that :func:`shared_ranks` has started."""
    for ranks in _kept.values():
        ranks.close()
    _kept.clear()


def failure_text(record: dict[str, Any]) -> str:
    """A verdict for a person: where, how it differs, and the command that runs just that trial."""
    from rich.console import Console

    from sbp.session import Verdict
    from sbp.terminal import print_failures

    verdict = Verdict.from_dict(record)
    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None, highlight=False)
    command = record.get("command", "")
    print_failures(console, [verdict], lambda trial: command, "")
    if not verdict.failed:
        reasons = [finding.relation for finding in verdict.findings]
        return "\n  ".join([f"{verdict.verdict}  {verdict.trial.id}", *reasons])
    return text.getvalue().strip()
