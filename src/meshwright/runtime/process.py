"""Read rank and world size from the variables of the launcher. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config import environment
from ..config.environment import LauncherVariables


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """The ranks of one process, and the sizes of the world and of its host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str | None = None
    """The launcher that started the processes, or None for a single process."""

    @classmethod
    def from_environment(cls) -> ProcessInfo:
        """Read the variables of torchrun, MPI or Slurm; without any this is a single process."""
        for launcher in environment.LAUNCHERS:
            found = launcher.read()
            if found is not None:
                return _from_launcher(launcher, found)
        return cls()

    def rendezvous_address(self) -> str | None:
        """Return the address of the rendezvous, or None where torch reads it from torchrun's variables."""
        if self.world_size == 1 or self.launcher in (None, "torchrun"):
            return None
        if self.launcher == "torch_xla":
            return "xla://"
        host = environment.read("MASTER_ADDR") or _first_host(self)
        port = environment.read("MASTER_PORT") or port_of_this_job(self)
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _from_launcher(launcher: LauncherVariables, found: dict[str, str]) -> ProcessInfo:
    try:
        numbers = {key: int(value) for key, value in found.items()}
    except ValueError as error:
        raise ValueError(
            f"{launcher.name} started this process with rank variables ({launcher.rank}, {launcher.world_size}, ...) "
            f"that are not numbers: {found}."
        ) from error
    rank, world_size = numbers["rank"], numbers["world_size"]
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{launcher.name} says this is rank {rank} of {world_size} processes; ranks go from 0 to "
            f"{world_size - 1}. Check {launcher.rank} and {launcher.world_size}, or start the script with torchrun."
        )
    local_world_size = numbers.get("local_world_size")
    if local_world_size is None:
        local_world_size = _slurm_local_world_size() if launcher.name == "Slurm" else world_size
    return ProcessInfo(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get("local_rank", rank % local_world_size),
        local_world_size=local_world_size,
        launcher=launcher.name,
    )


def _slurm_local_world_size() -> int:
    """Read this node's number of tasks from a list such as `2(x3),1`."""
    groups = environment.read(environment.SLURM_TASKS_PER_NODE) or "1"
    node = int(environment.read(environment.SLURM_NODE_ID) or 0)
    counts: list[int] = []
    for group in groups.split(","):
        matched = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", group.strip())
        if matched is None:
            raise ValueError(f"{environment.SLURM_TASKS_PER_NODE}={groups!r} cannot be read: expected `2(x3),1`.")
        counts.extend([int(matched[1])] * int(matched[2] or 1))
    return counts[node] if node < len(counts) else counts[-1]


def _first_host(process: ProcessInfo) -> str:
    if process.local_world_size == process.world_size:
        return "127.0.0.1"
    nodes = environment.read(environment.SLURM_NODE_LIST)
    if process.launcher == "Slurm" and nodes:
        return first_slurm_host(nodes)
    if process.launcher == "OpenMPI" and (address := _address_of_mpirun(process)) is not None:
        return address
    raise ValueError(
        f"{process.launcher} started {process.world_size} processes on several hosts (this is rank {process.rank}), "
        "but does not say where they can connect: set MASTER_ADDR to a host name or address that every process can "
        "reach (mpirun -x MASTER_ADDR=...)."
    )


def _address_of_mpirun(process: ProcessInfo) -> str | None:
    """Return the address of the host where `mpirun` was started, if rank 0 runs there."""
    # Such as `943325184.0;tcp://10.0.0.1,192.168.0.1:49469`. Only rank 0 can tell whether that is its own host; if it
    # is not, its error ends the job.
    daemon = environment.read(environment.OPENMPI_FIRST_DAEMON) or ""
    if process.rank == 0 and daemon != environment.read(environment.OPENMPI_OWN_DAEMON):
        return None
    found = re.search(r"tcp6?://\[?([^,\]]+)\S*:\d+", daemon)
    return found[1] if found else None


def first_slurm_host(nodes: str) -> str:
    """Return the first name of a Slurm node list such as `gpu[003-007,9],login1`."""
    first = re.fullmatch(r"((?:[^,\[]|\[\d[^\]]*\])+)(?:,.*)?", nodes)
    if first is None or not nodes.isprintable():
        raise ValueError(f"The Slurm node list {nodes!r} cannot be read: expected `gpu[003-007,9],login1`.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[1])


def port_of_this_job(process: ProcessInfo) -> int:
    """Choose a port that is the same for all processes of the job, and rarely that of another job."""
    for variable in environment.JOB_NUMBERS:
        job = environment.read(variable)
        if job:
            import hashlib

            if process.launcher == "Slurm":  # two steps of one job may run at once
                job += f".{environment.read(environment.SLURM_STEP_ID)}"
            return 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 20000
    return 29500
