"""How each launcher starts the ranks: the commands to type, and what they need.

=========  ==================================================================  ======================================
launcher   command                                                             the ranks' supervisors talk over
=========  ==================================================================  ======================================
MPICH      ``mpirun -n 4 python -m sbp.run``                                   MPI
Open MPI   the same; as root, or with more ranks than cores, the variables     MPI
           of :func:`open_mpi_variables` must be set
torchrun   ``torchrun --nproc-per-node 4 -m sbp.run``                          TCP, found through torchrun's own store
Slurm      ``srun -n 4 python -m sbp.run``                                     TCP, found through a store on the
                                                                               step's first host
none       ``python -m sbp.run -n 4``                                          MPI where there is an mpirun, else TCP
=========  ==================================================================  ======================================

One environment holds one MPI runtime: with both MPICH and Open MPI in it neither works.
"""

from __future__ import annotations

from collections.abc import Sequence


def open_mpi_variables() -> dict[str, str]:
    """What lets Open MPI run as root and put more ranks on a host than it has cores. MPICH does not look at it."""
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def mpirun_command(ranks: int, arguments: Sequence[str], hosts: Sequence[str] = ()) -> list[str]:
    """``mpirun`` on this host, or on ``hosts`` (MPICH's and Open MPI's spelling are the same up to here)."""
    where = ["--host", ",".join(hosts)] if hosts else []
    return ["mpirun", "-n", str(ranks), *where, *arguments]


def torchrun_command(
    ranks_per_host: int, arguments: Sequence[str], hosts: int = 1, host: int = 0, first: str = "localhost"
) -> list[str]:
    """``torchrun`` on one of several hosts; ``arguments`` begin with ``-m`` or a script. Alone it takes a free port;
    several hosts meet on port 29500 of the ``first``."""
    if hosts == 1:
        return ["torchrun", "--standalone", "--nproc-per-node", str(ranks_per_host), *arguments]
    where = [
        "--nnodes",
        str(hosts),
        "--node-rank",
        str(host),
        "--master-addr",
        first,
        "--master-port",
        "29500",
    ]
    return ["torchrun", *where, "--nproc-per-node", str(ranks_per_host), *arguments]


def slurm_command(ranks: int, arguments: Sequence[str], hosts: int = 1) -> list[str]:
    """``srun`` without an MPI plugin: the ranks find each other over TCP."""
    return ["srun", "--mpi=none", "--nodes", str(hosts), "--ntasks", str(ranks), *arguments]
