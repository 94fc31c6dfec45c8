"""The only place that reads `os.environ`: one table of settings, one of launchers, both plain data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """Read a yes/no word as people write it: as 1 or 0, or as True or False with `to_bool`."""
    word = value.strip().lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE if to_bool else int(word in _TRUE)
    raise ValueError(f"{value!r} is neither yes nor no: use one of 1, 0, true, false, yes, no, on, off.")


# Setting -> the published variable that carries it into a child process, and the type it is read as.
SETTING_VARIABLES: Mapping[str, tuple[str, type]] = {
    "cpu": ("ACCELERATE_USE_CPU", bool),
    "cpu_affinity": ("ACCELERATE_CPU_AFFINITY", bool),
    "debug": ("ACCELERATE_DEBUG_MODE", bool),
    "device": ("ACCELERATE_TORCH_DEVICE", str),
    "fork_launched": ("FORK_LAUNCHED", bool),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int),
    "log_level": ("ACCELERATE_LOG_LEVEL", str),
    "mixed_precision": ("ACCELERATE_MIXED_PRECISION", str),
}

# Engines that the published variables can ask for and that this version refuses by name.
ENGINE_VARIABLES: Mapping[str, str] = {
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED",
    "FSDP": "ACCELERATE_USE_FSDP",
    "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM",
    "a parallelism configuration": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


def variable_of(setting: str) -> str:
    """Return the name of the variable that carries a setting."""
    return SETTING_VARIABLES[setting][0]


def read_setting(setting: str) -> Any:
    """Return a setting from the environment, or None where its variable is not set."""
    return _read_as(*SETTING_VARIABLES[setting])


def _read_as(name: str, kind: type) -> Any:
    raw = os.environ.get(name)
    if raw is None:
        return None
    try:
        return str_to_bool(raw, to_bool=True) if kind is bool else kind(raw)
    except ValueError as error:
        raise ValueError(f"The environment variable {name}={raw!r} is not a valid {kind.__name__}: {error}") from error


def export_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that carry these settings into a child process; None is left out."""
    return {variable_of(name): str(value) for name, value in settings.items() if value is not None}


# The folder of a diary, which `accelerate verify-resume` asks a run to keep.
TRACE_FOLDER = "ACCELERATE_TRACE_FOLDER"

# A setting that changes speed, not results: it is warned about until it has an effect.
COMPILE_VARIABLE = "ACCELERATE_DYNAMO_BACKEND"


def requested_engine() -> tuple[str, str] | None:
    """Return (engine, variable) if the environment asks for an engine other than plain data parallelism."""
    for engine, variable in ENGINE_VARIABLES.items():
        if _read_as(variable, bool):
            return engine, variable
    return None


@dataclass(frozen=True, kw_only=True)
class LauncherVariables:
    """The variables in which one kind of launcher tells a process who it is."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None = None
    required: str | None = None  # present only where the launcher really started this process

    def read(self) -> dict[str, str] | None:
        """Return the raw values, or None where this launcher did not start the process."""
        if self.required is not None and self.required not in os.environ:
            return None
        if self.rank not in os.environ or self.world_size not in os.environ:
            return None
        found = {"rank": os.environ[self.rank], "world_size": os.environ[self.world_size]}
        if self.local_rank in os.environ:
            found["local_rank"] = os.environ[self.local_rank]
        if self.local_world_size is not None and self.local_world_size in os.environ:
            found["local_world_size"] = os.environ[self.local_world_size]
        return found


# In order: whoever is nearer to the process wins (torchrun inside an srun step, srun inside an mpirun, ...).
LAUNCHERS = (
    LauncherVariables(
        name="torchrun",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
    ),
    LauncherVariables(
        name="OpenMPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherVariables(
        name="MVAPICH",
        rank="MV2_COMM_WORLD_RANK",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # `srun --mpi=pmi2` sets PMI_RANK too, but without a local rank: that process is Slurm's, below.
    LauncherVariables(
        name="MPICH",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        required="MPI_LOCALRANKID",
    ),
    # The body of an sbatch script also has SLURM_PROCID, but is one process: only a step has a step id.
    LauncherVariables(
        name="Slurm",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        required="SLURM_STEP_ID",
    ),
)

SLURM_NODE_LIST = "SLURM_STEP_NODELIST"
SLURM_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
SLURM_NODE_ID = "SLURM_NODEID"
SLURM_STEP_ID = "SLURM_STEP_ID"
OPENMPI_FIRST_DAEMON = "OMPI_MCA_orte_hnp_uri"  # of mpirun itself; since 5.0 it is no longer told
OPENMPI_OWN_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
# What every process of one job shares and other jobs on the host do not, the narrowest first: it picks the port.
JOB_NUMBERS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID")


def read(name: str) -> str | None:
    """Return one variable, or None."""
    return os.environ.get(name)


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set variables (names upper-cased) inside the block and put back what was there."""
    before = {name.upper(): os.environ.get(name.upper()) for name in variables}
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside the block and put everything back afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
