"""A process manager for MPI, as small as can be: it lets processes that no mpirun started become one MPI world.

It speaks the simple wire protocol of PMI version 1, which MPICH and its descendants understand: each process has a
socket in PMI_FD, over which it puts and gets keys and waits at barriers. Run as ``python -m sbp.subjects.pmi SOCKET
SIZE PID`` with a listening socket that it inherits and the process of rank 0; it ends when all have gone. See "PMI:
A Scalable Parallel Process-Management Interface for Extreme-Scale Systems" (Balaji et al., EuroMPI 2010).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import socket
import sys
from collections.abc import Callable, Mapping

_ANSWERS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
    "get_appnum": "cmd=appnum appnum=0 rc=0",
    "finalize": "cmd=finalize_ack rc=0",
}


class Manager:
    """The state of one MPI world of ``size`` processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        # MPICH names shared memory after it, so it must differ from that of every other world on this machine.
        self.space = f"sbp_{os.getpid()}_{secrets.token_hex(4)}"
        self.values: dict[str, str] = {}
        self.waiting: list[socket.socket] = []

    def answer(self, client: socket.socket, fields: Mapping[str, str]) -> None:
        """Answer one command."""
        command = fields.get("cmd", "")
        if command == "barrier_in":
            self.waiting.append(client)
            if len(self.waiting) == self.size:
                for one in self.waiting:
                    one.sendall(b"cmd=barrier_out rc=0\n")
                self.waiting.clear()
            return
        if command == "put":
            self.values[fields["key"]] = fields["value"]
            text = "cmd=put_result rc=0 msg=success"
        elif command == "get":
            value = self.values.get(fields["key"])
            text = "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            if value is not None:
                text = f"cmd=get_result rc=0 msg=success value={value}"
        elif command == "get_my_kvsname":
            text = f"cmd=my_kvsname kvsname={self.space} rc=0"
        elif command == "get_universe_size":
            text = f"cmd=universe_size size={self.size} rc=0"
        else:
            text = _ANSWERS.get(command, f"cmd={command} rc=-1 msg=not_supported")
        client.sendall(text.encode() + b"\n")


def shared_memory_of(pid: int) -> set[str]:
    """The files of MPICH's shared memory that a process has mapped."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return set(re.findall(r"/dev/shm/mpich_shm_\w+", file.read()))
    except OSError:
        return set()


def serve(listener: socket.socket, size: int, first: int) -> None:
    """Serve until as many processes as the world has have come and gone.

    They may be killed, so what MPICH left of its shared memory (mapped by the process ``first``) is removed then.
    """
    memory: set[str] = set()
    try:
        _serve(listener, size, lambda: memory.update(shared_memory_of(first)))
    finally:
        for path in memory:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _serve(listener: socket.socket, size: int, look: Callable[[], None]) -> None:
    manager, buffers, ended = Manager(size), dict[socket.socket, bytes](), 0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        quiet = False
        while ended < size:
            # Nothing is said after the start, so one look after a while of silence sees all.
            events = selector.select(None if quiet else 1.0)
            quiet = not events
            look()
            for key, _ in events:
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    buffers[client] = b""
                    selector.register(client, selectors.EVENT_READ)
                    continue
                client = key.fileobj  # type: ignore[assignment]
                try:
                    data = client.recv(1 << 16)
                except OSError:
                    data = b""
                if not data:
                    selector.unregister(client)
                    client.close()
                    del buffers[client]
                    ended += 1
                    continue
                *lines, buffers[client] = (buffers[client] + data).split(b"\n")
                for line in lines:
                    words = (word.partition("=") for word in line.decode("latin-1").split(" "))
                    manager.answer(client, {name: value for name, _, value in words})


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
