"""The only place that reads `os.environ`: one table of settings, one of launchers, both plain data."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

logger = logging.getLogger("accelerate.utils.environment")  # as published: programs set the level of its log
F = TypeVar("F", bound=Callable[..., Any])

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """Parse a yes/no word: as 1 or 0, or as True or False with `to_bool`."""
    word = value.strip().lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE if to_bool else int(word in _TRUE)
    raise ValueError(f"{value!r} is neither yes nor no: use one of 1, 0, true, false, yes, no, on, off.")


# Setting -> the published variable that carries it into a child process, and the type it is read as.
SETTING_VARIABLES: Mapping[str, tuple[str, type]] = {
    "check_replicas_every": ("MESHWRIGHT_CHECK_REPLICAS_EVERY", int),
    "cpu": ("ACCELERATE_USE_CPU", bool),
    "cpu_affinity": ("ACCELERATE_CPU_AFFINITY", bool),
    "data_order": ("MESHWRIGHT_DATA_ORDER", str),
    "debug": ("ACCELERATE_DEBUG_MODE", bool),
    "debug_rank": ("MESHWRIGHT_DEBUG_RANK", int),
    "device": ("ACCELERATE_TORCH_DEVICE", str),
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", str),
    "dynamo_mode": ("ACCELERATE_DYNAMO_MODE", str),
    "dynamo_use_dynamic": ("ACCELERATE_DYNAMO_USE_DYNAMIC", bool),
    "dynamo_use_fullgraph": ("ACCELERATE_DYNAMO_USE_FULLGRAPH", bool),
    "dynamo_use_regional_compilation": ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", bool),
    "first_steps": ("MESHWRIGHT_FIRST_STEPS", str),
    "fp8_amax_compute_algo": ("ACCELERATE_FP8_AMAX_COMPUTE_ALGO", str),
    "fp8_amax_history_len": ("ACCELERATE_FP8_AMAX_HISTORY_LEN", int),
    "fp8_backend": ("ACCELERATE_FP8_BACKEND", str),
    "fp8_enable_fsdp_float8_all_gather": ("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", bool),
    "fp8_format": ("ACCELERATE_FP8_FORMAT", str),
    "fp8_interval": ("ACCELERATE_FP8_INTERVAL", int),
    "fp8_margin": ("ACCELERATE_FP8_MARGIN", int),
    "fp8_pad_inner_dim": ("ACCELERATE_FP8_PAD_INNER_DIM", bool),
    "fp8_use_autocast_during_eval": ("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", bool),
    "fork_launched": ("FORK_LAUNCHED", bool),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int),
    "hang_seconds": ("MESHWRIGHT_HANG_SECONDS", float),
    "instruments": ("MESHWRIGHT_INSTRUMENTS", str),
    "log_level": ("ACCELERATE_LOG_LEVEL", str),
    "memory_copies_dir": ("MESHWRIGHT_MEMORY_COPIES_DIR", str),
    "memory_copies_every": ("MESHWRIGHT_MEMORY_COPIES_EVERY", int),
    "mixed_precision": ("ACCELERATE_MIXED_PRECISION", str),
    "offload_training": ("MESHWRIGHT_OFFLOAD_TRAINING", str),
    "replace_hung_after": ("MESHWRIGHT_REPLACE_HUNG_AFTER", float),
    "survive": ("MESHWRIGHT_SURVIVE", bool),
    "use_torch_xla": ("USE_TORCH_XLA", bool),
}

USE_FSDP = "ACCELERATE_USE_FSDP"
USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
USE_MEGATRON = "ACCELERATE_USE_MEGATRON_LM"
USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"

# Field of the plugin -> the published variable.
FSDP_VARIABLES: Mapping[str, str] = {
    "fsdp_version": "FSDP_VERSION",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "ignored_modules": "FSDP_IGNORED_MODULES",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
}

# Field of `DeepSpeedPlugin` -> the published variable.
DEEPSPEED_VARIABLES: Mapping[str, str] = {
    "hf_ds_config": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "transformer_moe_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}

# Field of `ParallelismConfig` (or of its handlers) -> type; the published variable is the field in capitals.
PARALLELISM_FIELDS: Mapping[str, type] = {
    **{f"{axis}_size": int for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "sp", "ep")},
    "cp_backend": str,
    "sp_backend": str,
    "cp_comm_strategy": str,
    "sp_seq_length": int,
    "sp_seq_length_is_variable": bool,
    "sp_attn_implementation": str,
}

PARALLELISM_SIZES = tuple(field for field in PARALLELISM_FIELDS if field.endswith("_size"))

# Field of `MegatronLMPlugin` -> type; the published variable is MEGATRON_LM_ and the field in capitals.
MEGATRON_FIELDS: Mapping[str, type] = {
    "tp_degree": int,
    "pp_degree": int,
    "num_micro_batches": int,
    "gradient_clipping": float,
    "sequence_parallelism": bool,
    "recompute_activations": bool,
    "use_distributed_optimizer": bool,
    "use_custom_fsdp": bool,
    "no_load_optim": bool,
    "no_save_optim": bool,
    "eod_mask_loss": bool,
    "optimizer_cpu_offload": bool,
    "overlap_cpu_optimizer_d2h_h2d": bool,
    "use_precision_aware_optimizer": bool,
    "decoder_last_pipeline_num_layers": int,
    "recompute_granularity": str,
    "recompute_method": str,
    "recompute_num_layers": int,
    "attention_backend": str,
    "expert_model_parallel_size": int,
    "expert_tensor_parallel_size": int,
    "context_parallel_size": int,
    "attention_dropout": float,
    "hidden_dropout": float,
    "attention_softmax_in_fp32": bool,
    "calculate_per_token_loss": bool,
    "use_rotary_position_embeddings": bool,
}

MEGATRON_SIZES = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size")


def read_fsdp() -> dict[str, str] | None:
    """Return the fields of the FSDP plugin that the environment sets, or None where it does not ask for FSDP."""
    if not _read_as(USE_FSDP, bool):
        return None
    return {field: os.environ[name] for field, name in FSDP_VARIABLES.items() if os.environ.get(name)}


def asks_for_deepspeed() -> bool:
    """Return whether the environment enables DeepSpeed."""
    return bool(_read_as(USE_DEEPSPEED, bool))


def read_deepspeed() -> dict[str, str]:
    """Return the fields of the DeepSpeed plugin that the environment sets: none where it does not ask for DeepSpeed."""
    if not asks_for_deepspeed():
        return {}
    return {field: os.environ[name] for field, name in DEEPSPEED_VARIABLES.items() if os.environ.get(name)}


def asks_for_megatron() -> bool:
    """Return whether the environment enables Megatron-LM, by its switch or by a size."""
    return _is_on(USE_MEGATRON, (f"MEGATRON_LM_{field.upper()}" for field in MEGATRON_SIZES))


def read_megatron() -> dict[str, Any]:
    """Return the fields of the Megatron-LM plugin that the environment sets."""
    names = {field: f"MEGATRON_LM_{field.upper()}" for field in MEGATRON_FIELDS}
    return {field: _read_as(name, MEGATRON_FIELDS[field]) for field, name in names.items() if os.environ.get(name)}


def asks_for_parallelism() -> bool:
    """Return whether the environment enables a mesh, by its switch or by the size of an axis."""
    return _is_on(USE_PARALLELISM, (f"PARALLELISM_CONFIG_{field.upper()}" for field in PARALLELISM_SIZES))


def _is_on(switch: str, sizes: Iterable[str]) -> bool:
    """Read a switch. Where it is not set, a size other than 1 is a request for what it is the size of."""
    asked = _read_as(switch, bool)
    if asked is not None:
        return bool(asked)
    return any(os.environ.get(name) and _read_as(name, int) != 1 for name in sizes)


def read_parallelism(field: str) -> Any:
    """Return a field of `ParallelismConfig` or of its handlers from the environment, or None where it sets none."""
    name = f"PARALLELISM_CONFIG_{field.upper()}"
    return _read_as(name, PARALLELISM_FIELDS[field]) if os.environ.get(name) else None


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


def take(name: str) -> str:
    """Return a variable, and remove it: a secret is not for the processes that this one starts."""
    return os.environ.pop(name, "")


def export(variables: Mapping[str, str]) -> None:
    """Set variables, for other libraries in this process to read."""
    os.environ.update(variables)


def export_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that carry these settings into a child process; None is left out."""
    return {variable_of(name): str(value) for name, value in settings.items() if value is not None}


# The instrument of `meshwright check`, and the exit code of a process in which it has found mistakes.
CHECK = "meshwright.tools.check:check"
CHECK_FAILED_CODE = 3

# The instrument that every Accelerator has without being asked, and how it may be told to behave.
FIRST_STEPS = "meshwright.tools.first_steps.instrument:first_steps"
FIRST_STEPS_MODES = ("warn", "raise", "off")

# The launcher's store through which the members of a run agree, as host:port, and how many processes a rank had before
# this one; set by `meshwright launch --survive`.
MEMBERSHIP_STORE = "MESHWRIGHT_MEMBERSHIP_STORE"
INCARNATION = "MESHWRIGHT_INCARNATION"

# The folder for the trace of a run, set by `meshwright check --resume`.
TRACE_FOLDER = "MESHWRIGHT_TRACE_FOLDER"

# The folder for the recordings of a run, set by `meshwright check --mesh`.
VERIFY_FOLDER = "MESHWRIGHT_VERIFY_FOLDER"


@dataclass(frozen=True, kw_only=True)
class LauncherVariables:
    """The variables in which one kind of launcher passes rank and world size to a process."""

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


# In order: the innermost launcher wins (torchrun inside an srun step, srun inside an mpirun, ...).
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


@dataclass(frozen=True, kw_only=True)
class MachineVariables:
    """The variables in which one kind of cluster tells the launcher of a machine its place among the machines."""

    name: str
    num_machines: str
    machine_rank: str
    address: str
    port: str | None = None
    processes_per_machine: str | None = None
    required: tuple[str, ...] = ()  # without all of these, the others may mean something else

    def are_set(self) -> bool:
        """Return whether this kind of cluster started the machine."""
        return all(os.environ.get(name) for name in (self.num_machines, *self.required))


KUBERNETES = "KUBERNETES_SERVICE_HOST"  # in every pod
# In order: TrainJobs and newer PyTorchJobs set torchrun's own names, and the older ones beside them.
MACHINES = (
    MachineVariables(
        name="the pod's PET_ variables",
        num_machines="PET_NNODES",
        machine_rank="PET_NODE_RANK",
        address="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
        processes_per_machine="PET_NPROC_PER_NODE",
    ),
    MachineVariables(
        name="PyTorchJob",
        num_machines="WORLD_SIZE",
        machine_rank="RANK",
        address="MASTER_ADDR",
        port="MASTER_PORT",
        required=("RANK", "MASTER_ADDR", KUBERNETES),  # elsewhere they are left over from another launch
    ),
    MachineVariables(
        name="LeaderWorkerSet",
        num_machines="LWS_GROUP_SIZE",
        machine_rank="LWS_WORKER_INDEX",
        address="LWS_LEADER_ADDRESS",
    ),
    MachineVariables(
        name="SkyPilot",
        num_machines="SKYPILOT_NUM_NODES",
        machine_rank="SKYPILOT_NODE_RANK",
        address="SKYPILOT_NODE_IPS",  # all of them, a line for each
    ),
)
TORCHRUN_ENDPOINT = "PET_RDZV_ENDPOINT"  # host:port, for machines that come and go
JOB_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # in every pod of an indexed Job, and of a JobSet

SLURM_NODE_LIST = "SLURM_STEP_NODELIST"
SLURM_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
SLURM_NODE_ID = "SLURM_NODEID"
SLURM_STEP_ID = "SLURM_STEP_ID"
OPENMPI_FIRST_DAEMON = "OMPI_MCA_orte_hnp_uri"  # of mpirun itself; not set since 5.0
OPENMPI_OWN_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
# Ids that all processes of one job share and other jobs on the host do not, the narrowest first. They select the port.
JOB_NUMBERS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID", "SKYPILOT_TASK_ID")


# Kind of accelerator -> the variables that restrict which devices a process sees. The first is the one that we set.
VISIBLE_DEVICES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "mlu": ("MLU_VISIBLE_DEVICES",),
    "musa": ("MUSA_VISIBLE_DEVICES",),
    "sdaa": ("SDAA_VISIBLE_DEVICES",),
    "hpu": ("HABANA_VISIBLE_MODULES",),
    "neuron": ("NEURON_RT_VISIBLE_CORES",),
    "tpu": ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
}
# What torch_tpu's processes have to know of the chips of all processes.
TPU_LAUNCH_VARIABLES = ("TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_XPROF_SESSION_ID")
SLURM_GPUS_PER_TASK = "SLURM_GPUS_PER_TASK"
SLURM_CPU_BIND_TYPE = "SLURM_CPU_BIND_TYPE"
# The GPUs of a job on this node, as the driver numbers them. CUDA_VISIBLE_DEVICES may number those of the job only.
SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


def read_visible_devices(kind: str) -> list[str] | None:
    """Return the devices that this process is restricted to, as the variable names them; None without a restriction."""
    values = (os.environ.get(name) for name in VISIBLE_DEVICES.get(kind, ()))
    value = next((value for value in values if value is not None), None)
    return None if value is None else [word.strip() for word in value.split(",") if word.strip()]


def read(name: str) -> str | None:
    """Return one variable, or None."""
    return os.environ.get(name)


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set variables (names upper-cased) inside the block and restore them afterwards."""
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
    """Empty the environment inside the block and restore it afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- used by other libraries ------------------------------------------------------------------------------------------


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable as yes or no."""
    value = _read_as(key, bool)
    return default if value is None else bool(value)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable as it is."""
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of several variables that is set to a number that is not negative."""
    for key in env_keys:
        value = _read_as(key, int)
        if value is not None and value >= 0:
            return int(value)
    return default


def purge_accelerate_environment(func_or_cls: F) -> F:
    """Restore the `ACCELERATE_` variables after a function, or after every test method of a class.

    Test methods that a subclass adds are covered too.
    """
    if isinstance(func_or_cls, type):
        _purge_after_tests(func_or_cls)
        return func_or_cls

    @wraps(func_or_cls)
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = _own_variables()
        try:
            return func_or_cls(*args, **kwargs)
        finally:
            for name in _own_variables().keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

    return cast("F", purged)


def _purge_after_tests(cls: Any) -> None:
    """Wrap the test methods of a class, and of every later subclass."""
    _wrap_tests_of(cls)
    own = vars(cls).get("__init_subclass__")

    def wrap_subclass(subclass: Any, /, **kwargs: Any) -> None:
        hook = super(cls, subclass).__init_subclass__ if own is None else own.__get__(None, subclass)
        hook(**kwargs)
        _wrap_tests_of(subclass)

    cls.__init_subclass__ = classmethod(wrap_subclass)


def _wrap_tests_of(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if name.startswith("test") and callable(member):
            setattr(cls, name, purge_accelerate_environment(member))


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return lines `NAME=value` for a file of variables; what a shell could read as more than that is left out."""
    lines = []
    for name, value in current_env.items():
        if name and value and not _UNSAFE_CHARACTERS & {*name, *value}:
            lines.append(f"{name}={value}\n")
        else:
            logger.warning("%s is left out: its name or value is empty, or a shell would read it otherwise.", name)
    return lines


_UNSAFE_CHARACTERS = frozenset(";&|<> \n\t`$")
