"""The warm process of a rank: it has imported what workers need and forks them on request.

Started as ``python -m launch.warm CONTROL PRELOAD... [-- LATER...]`` by the rank's supervisor. Requests come over the
inherited socket CONTROL, each with the file descriptors that the new process is to have. What stands after ``--`` is
prepared when the supervisor says so, so that it is there for later workers without holding up the first.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any

from launch.process import die_with_parent
from launch.wire import Connection, ConnectionClosed, decode, encode
from launch.worker import WorkerContext, describe, find_entry, serve, settle

_MOST = 1 << 16
# How long nobody must have asked for anything before something is prepared, in seconds.
_BREATH = 0.3


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when it is over
    control = socket.socket(fileno=int(sys.argv[1]))
    failure = ""
    first, later = sys.argv[2:], []
    if "--" in first:
        cut = first.index("--")
        first, later = first[:cut], first[cut + 1 :]
    # Imports make a great many objects and hardly any garbage: collecting meanwhile would take a fifth of their time.
    gc.disable()
    for module in first:
        try:
            importlib.import_module(module)
        except BaseException as error:
            failure = f"{module} could not be imported: {type(error).__name__}: {error}"
            break
    # What is imported stays for ever: forked children must not copy its pages only to count references.
    gc.freeze()
    gc.enable()
    _serve(control, failure, later)


def _serve(control: socket.socket, failure: str, later: list[str]) -> None:
    wakeup, notify = os.pipe()
    os.set_blocking(notify, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wanted = False
    while True:
        # Prepared while nobody asks for anything.
        preparing = wanted and later
        readable, _, _ = select.select([control.fileno(), wakeup], [], [], _BREATH if preparing else None)
        if preparing and not readable:
            _prepare(later.pop(0))
            continue
        if wakeup in readable:
            try:
                os.read(wakeup, 4096)
            except BlockingIOError:
                pass
        try:
            _report_ends(control)
            if control.fileno() not in readable:
                continue
            data, files, _, _ = socket.recv_fds(control, _MOST, 4)
        except ConnectionError:  # the supervisor has gone, with messages unread
            return
        if not data:
            return
        request = decode(data)
        if request["kind"] == "prepare":
            wanted = True
            continue
        if failure:
            answer: dict[str, Any] = {"failure": failure}
        else:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for file in (wakeup, notify):
                    os.close(file)
                control.close()
                _become(request, files)
            answer = {"pid": pid}
        for file in files:
            os.close(file)
        try:
            control.sendall(encode(answer))
        except ConnectionError:
            return


def _prepare(name: str) -> None:
    """Import ``module``, or call ``module:function``. What fails here fails again, with its error, in a worker."""
    try:
        if ":" in name:
            find_entry(name)()
        else:
            importlib.import_module(name)
    except BaseException:
        return
    # There is time now, so the first imports' garbage goes as well.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _report_ends(control: socket.socket) -> None:
    """Tell the supervisor of the children that have ended, and how."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.sendall(encode({"ended": pid, "status": status}))


def _become(request: dict[str, Any], files: list[int]) -> None:
    """In the forked child: be what was asked for, and never return."""
    code = 1
    try:
        sock, stacks, output = files
        settle(stacks, output)
        gc.unfreeze()
        if request["kind"] == "worker":
            for name, value in request["environment"].items():
                os.environ.setdefault(name, value)
            serve(socket.socket(fileno=sock), request["entry"], WorkerContext(**request["context"]))
        else:
            run_side(socket.socket(fileno=sock), request["entry"], request["argument"])
        code = 0
    finally:
        os._exit(code)


def run_side(sock: socket.socket, entry: str, argument: Any) -> None:
    """Run ``entry(argument, connection)``; an exception becomes its last message."""
    connection = Connection(sock)
    try:
        find_entry(entry)(argument, connection)
    except ConnectionClosed:
        return
    except BaseException as error:
        try:
            connection.send({"raised": describe(error)})
        except ConnectionClosed:
            return


if __name__ == "__main__":
    main()
