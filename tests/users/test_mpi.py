"""The process manager that makes workers one MPI world, on its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sbp.subjects.pmi import Manager, serve, shared_memory_of


class Client:
    """What MPICH says to its process manager."""

    def __init__(self, port: int) -> None:
        self.file = socket.create_connection(("127.0.0.1", port)).makefile("rw")

    def ask(self, line: str) -> str:
        self.file.write(line + "\n")
        self.file.flush()
        return self.file.readline().rstrip("\n")


@pytest.fixture
def port() -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, 2, os.getpid()), daemon=True).start()
    return int(listener.getsockname()[1])


def test_keys_are_shared_and_barriers_wait_for_all(port: int) -> None:
    one, other = Client(port), Client(port)
    assert one.ask("cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init pmi_version=1")
    assert one.ask("cmd=get_universe_size") == "cmd=universe_size size=2 rc=0"
    space = one.ask("cmd=get_my_kvsname").split("kvsname=")[1].split()[0]
    assert one.ask(f"cmd=put kvsname={space} key=a value=x=1;y#2") == "cmd=put_result rc=0 msg=success"
    assert other.ask(f"cmd=get kvsname={space} key=b").startswith("cmd=get_result rc=-1")
    done: list[str] = []
    waiting = threading.Thread(target=lambda: done.append(one.ask("cmd=barrier_in")))
    waiting.start()
    waiting.join(0.2)
    assert not done
    assert other.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"
    waiting.join(10)
    assert done == ["cmd=barrier_out rc=0"]
    assert other.ask(f"cmd=get kvsname={space} key=a") == "cmd=get_result rc=0 msg=success value=x=1;y#2"
    assert other.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
    assert other.ask("cmd=spawn").startswith("cmd=spawn rc=-1")


def test_each_world_has_a_name_of_its_own() -> None:
    assert Manager(2).space != Manager(2).space


def test_shared_memory_is_found_by_who_maps_it(tmp_path: Path) -> None:
    assert shared_memory_of(os.getpid()) == set() and shared_memory_of(1 << 30) == set()


@pytest.mark.distributed
def test_forked_processes_become_one_mpi_world() -> None:
    code = """
import os, socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
words = [sys.executable, "-m", "sbp.subjects.pmi", str(listener.fileno()), "3", str(os.getpid())]
manager = subprocess.Popen(words, pass_fds=[listener.fileno()])
port = listener.getsockname()[1]
listener.close()
children = []
for rank in range(3):
    if (child := os.fork()) == 0:
        client = socket.create_connection(("127.0.0.1", port))
        client.set_inheritable(True)
        os.environ.update(PMI_FD=str(client.detach()), PMI_RANK=str(rank), PMI_SIZE="3")
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        right = (world.rank, world.size, world.allgather(rank * 10)) == (rank, 3, [0, 10, 20])
        os._exit(0 if right else 1)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
assert manager.wait(20) == 0
"""
    mine = ("PMI", "MPI", "HYDRA")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)
