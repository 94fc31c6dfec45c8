"""Detect the batch system of this launcher: one launcher per rank, one per machine, or the head of a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from math import prod

from ...config import environment
from ...errors import LaunchError
from ...runtime.process import ProcessInfo, first_slurm_host, port_of_this_job
from ...untrusted import printable

TASKS_PER_MACHINE = "MESHWRIGHT_TASKS_PER_MACHINE"
"""Set by the head of a job for the launchers it starts, one per machine, which cannot read it from Slurm."""
_MOST_MACHINES = 1 << 16
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
    machines = _number("SLURM_JOB_NUM_NODES") or 1
    tasks = environment.read("SLURM_TASKS_PER_NODE") if environment.read("SLURM_NTASKS") else None
    return Cluster(
        name="Slurm",
        is_head=machines > 1 or environment.read("SLURMD_NODENAME") is None,  # salloc: not on the job's machine
        num_machines=machines,
        tasks_per_machine=_number("SLURM_TASKS_PER_NODE", r"(\d{1,9})(?!\d).*") if tasks else None,
        hosts=environment.read("SLURM_JOB_NODELIST"),
    )


def _number(variable: str, form: str = r"(\d{1,9})") -> int | None:
    """Return the number that a variable holds, or None without one."""
    value = environment.read(variable)
    if not value:
        return None
    found = re.fullmatch(form, value)
    if found is None:
        raise LaunchError(f"{variable}={printable(value)!r} is not a number.")
    return int(found[1]) or None


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
        tasks_per_machine=_number(TASKS_PER_MACHINE),
        hosts=hosts,
    )


def expand_node_list(nodes: str) -> list[str]:
    """Return all names of a Slurm node list such as `gpu[003-005,9],login1`."""
    names: list[str] = []
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        pieces = re.split(r"\[([^\]]*)\]", group)  # text and ranges alternate
        choices = [_expand_ranges(piece, nodes) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        _require_plausible(len(names) + prod(map(len, choices)), nodes)
        names += map("".join, product(*choices))
    return names


def _expand_ranges(ranges: str, nodes: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if found is None:
            raise LaunchError(
                f"The Slurm node list {printable(nodes)!r} cannot be read: expected `gpu[003-007,9],login1`."
            )
        first, last = int(found[1]), int(found[2] or found[1])
        _require_plausible(len(numbers) + last + 1 - first, nodes)
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return numbers


def _require_plausible(number: int, nodes: str) -> None:
    if number > _MOST_MACHINES:
        raise LaunchError(f"The Slurm node list {printable(nodes)!r} names more than {_MOST_MACHINES:,} machines.")
