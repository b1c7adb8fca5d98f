"""Calls a function in a forked process, so that a crash of the interpreter costs only its result."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

Result = TypeVar("Result")


class Died(RuntimeError):
    """The process ended without a result; says how."""


def call_apart(function: Callable[[], Result], timeout: float) -> Result:
    """What ``function()`` returns in a fork of this process.

    Args:
        function: its result crosses between the processes by pickle.
        timeout: in seconds; the process is then killed.

    Raises Died where there is no result, with the exception's text where one was raised.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise Died(f"no result after {timeout:.0f} s")
        raised, value = receiver.recv()
    except EOFError:
        process.join(10)
        code = process.exitcode or 0
        raise Died(signal.Signals(-code).name if code < 0 else f"exit code {code}") from None
    finally:
        receiver.close()
        if process.is_alive():
            process.join(1)
        if process.is_alive():
            process.kill()
            process.join()
    if raised:
        raise Died(str(value))
    result: Result = value
    return result


def _answer(function: Callable[[], object], sender: Connection) -> None:
    try:
        sender.send((False, function()))
    except Exception as error:
        sender.send((True, f"{type(error).__name__}: {error}"))
