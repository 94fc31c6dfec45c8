"""Detect the batch system of this launcher: one launcher per rank, one per machine, or the head of a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from ...config import environment
from ...runtime.process import ProcessInfo, first_slurm_host, port_of_this_job

TASKS_PER_MACHINE = "MESHWRIGHT_TASKS_PER_MACHINE"
"""Set by the head of a job for the launchers it starts, one per machine, which cannot read it from Slurm."""
_INTERACTIVE_STEP = "4294967290"
"""Slurm's number for the shell that `salloc` opens on the first machine of a job."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The position of one launcher among the launchers of a job."""

    name: str
    """The batch system: Slurm, OpenMPI, ..."""
    is_rank: bool = False
    """One launcher was started per process, and is replaced by the script."""
    is_head: bool = False
    """Only this launcher was started, for a job of several machines: it starts the others by srun."""
    num_machines: int = 1
    machine_rank: int = 0
    """Which launcher this is."""
    num_processes: int = 1
    """Where every launcher is a process."""
    address: str | None = None
    port: int | None = None
    tasks_per_machine: int | None = None
    hosts: str | None = None
    """The machines, as the batch system writes them."""
    min_machines: int | None = None
    """Training may begin with so many machines, and go on with them."""
    processes_per_machine: int | None = None
    """As the job sets it, like `--num_processes`."""
    is_pods: bool = False
    """The machines are pods: they start minutes apart, and `MASTER_ADDR` in their environment is the cluster's."""


def find_cluster() -> Cluster | None:
    """Read the variables of Slurm or an MPI; return None without a batch system."""
    process = ProcessInfo.from_environment()
    interactive = environment.read(environment.SLURM_STEP_ID) == _INTERACTIVE_STEP
    if process.launcher == "Slurm" and _one_task_per_machine() and not interactive:
        return _one_machine_of_step(process)
    if process.launcher not in (None, "torchrun") and not interactive:
        return Cluster(
            name=str(process.launcher), is_rank=True, machine_rank=process.rank, num_processes=process.world_size
        )
    if environment.read("SLURM_JOB_ID") and environment.read("SLURM_JOB_NODELIST"):
        return _job_allocation()
    return None


def _job_allocation() -> Cluster:
    """Describe the script of an sbatch, or the shell of an salloc."""
    machines = int(environment.read("SLURM_JOB_NUM_NODES") or 1)
    tasks = environment.read("SLURM_TASKS_PER_NODE") if environment.read("SLURM_NTASKS") else None
    return Cluster(
        name="Slurm",
        is_head=machines > 1 or environment.read("SLURMD_NODENAME") is None,  # salloc: not on the job's machine
        num_machines=machines,
        tasks_per_machine=int(re.split(r"\D", tasks)[0]) if tasks else None,
        hosts=environment.read("SLURM_JOB_NODELIST"),
    )


def _one_task_per_machine() -> bool:
    machines = environment.read("SLURM_STEP_NUM_NODES")
    return machines is not None and machines == environment.read("SLURM_STEP_NUM_TASKS")


def _one_machine_of_step(process: ProcessInfo) -> Cluster:
    hosts = environment.read(environment.SLURM_NODE_LIST)
    several = process.world_size > 1
    return Cluster(
        name="Slurm",
        num_machines=process.world_size,
        machine_rank=process.rank,
        address=first_slurm_host(hosts) if several and hosts else None,
        port=port_of_this_job(process) if several else None,
        tasks_per_machine=int(environment.read(TASKS_PER_MACHINE) or 0) or None,
        hosts=hosts,
    )


def expand_node_list(nodes: str) -> list[str]:
    """Return all names of a Slurm node list such as `gpu[003-005,9],login1`."""
    names: list[str] = []
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        pieces = re.split(r"\[([^\]]*)\]", group)  # text and ranges alternate
        choices = [_expand_ranges(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += map("".join, product(*choices))
    return names


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
