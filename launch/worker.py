"""The life of a worker: it makes its handler, then answers one request after another until its socket closes."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.process import die_with_parent
from launch.wire import Connection, ConnectionClosed, decode, encode

Handler = Callable[[Any], Any]


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is. ``world_number`` counts the worlds of this run, the first being 1."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    hosts: tuple[str, ...]
    world_number: int


def find_entry(name: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names."""
    module, _, function = name.partition(":")
    entry: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return entry


def settle(stack_file: int, output_file: int) -> None:
    """Make this process a worker: a process group of its own, output into its file, stacks on SIGUSR1."""
    die_with_parent()
    os.setsid()
    os.dup2(output_file, 1)
    os.dup2(output_file, 2)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # Whatever the parent's objects buffered belongs to the parent.
    # These two stay open as long as the process lives.
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Written by the C signal handler: works while Python code or a C loop holds the interpreter.
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    faulthandler.enable(file=stack_file, all_threads=True)


def serve(sock: socket.socket, entry: str, context: WorkerContext) -> None:
    """Answer requests until the supervisor goes away. What a request raises is its answer, whatever it is."""
    connection = Connection(sock)
    handler: Handler | None = None
    while True:
        try:
            request = connection.receive_bytes()
        except ConnectionClosed:
            return
        assert request is not None
        try:
            if handler is None:
                handler = find_entry(entry)(context)
            answer = encode({"status": "ok", "value": handler(decode(request))})
        except BaseException as error:
            answer = encode({"status": "raised", **describe(error)})
        try:
            connection.send_bytes(answer)
        except ConnectionClosed:
            return


def describe(error: BaseException) -> dict[str, str]:
    """An exception as text. Its own methods may fail; that must not hide it."""
    try:
        message = str(error)
    except BaseException:
        message = "(the exception's text could not be made)"
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:
        trace = "(the traceback could not be made)"
    return {"error": type(error).__name__, "message": message[:10_000], "traceback": trace[-20_000:]}


def main() -> None:
    """A worker as a fresh interpreter: ``python -m launch.worker SOCKET STACKS OUTPUT ENTRY CONTEXT``, the first
    three being inherited file descriptors."""
    sock, stacks, output = (int(word) for word in sys.argv[1:4])
    settle(stacks, output)
    context = decode(bytes.fromhex(sys.argv[5]))
    serve(socket.socket(fileno=sock), sys.argv[4], WorkerContext(**context))
    # Without the interpreter's shutdown: threads that a subject left behind must not hold it up.
    os._exit(0)


if __name__ == "__main__":
    main()
