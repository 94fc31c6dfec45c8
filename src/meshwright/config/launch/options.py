"""The options of `meshwright launch` as plain data: flag, YAML key and environment variable in one row.

The parser, the reader of YAML files, the variables of the child processes and `--explain` are all made from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..enums import PrecisionType
from ..environment import PARALLELISM_SIZES, str_to_bool


def yes_no(word: str) -> bool:
    """Parse a yes/no word of the command line or of a variable."""
    return bool(str_to_bool(str(word), to_bool=True))


def three_yes_no(words: str) -> tuple[bool, ...]:
    """Parse three yes/no words such as `true,false,false`, or one for all three."""
    answers = tuple(yes_no(word) for word in str(words).strip("()").split(","))
    if len(answers) not in (1, 3):
        raise ValueError(f"{words!r} needs three words, such as true,false,false.")
    return answers * (3 // len(answers))


def spellings(name: str) -> tuple[str, ...]:
    """Return a flag with underscores and, where it has any, with dashes."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One setting of a launch, in all the places where it can be given."""

    name: str
    """The name in Python, which is also the flag: `--name`, or with dashes."""
    spelled: str | None = None
    """The flag, where it differs from the name."""
    has_flag: bool = True
    """Whether a launch takes it on its command line; if not, a verb of its own sets its variable."""
    negation: str | None = None
    """A flag that turns the switch off."""
    help: str
    group: str
    read: Callable[[str], Any] = str
    """Parser of the value; for a switch, parser of its variable."""
    switch: bool = False
    """A flag without a value."""
    default: Any = None
    choices: tuple[str, ...] | None = None
    short: tuple[str, ...] = ()
    repeated: bool = False
    yaml: str | None = None
    """Key in a YAML file, `section.key` inside a section; None where it has no place there."""
    variable: str | None = None
    """The published variable that carries it, in both directions."""
    engine: str | None = None
    """The engine that reads it, if it is not the launch itself."""
    needs: str | None = None
    """The option without which nothing reads it."""

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings on the command line."""
        return (*self.short, *spellings(self.spelled or self.name))


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return option names and values as words of a command line: the inverse of parsing."""
    words: list[str] = []
    for name, value in values.items():
        option = BY_NAME[name]
        flag = f"--{option.spelled or option.name}"
        if option.switch:
            words += [flag] if value else [f"--{option.negation}"] if option.negation else []
        elif option.repeated:
            words += [word for item in value for word in (flag, str(item))]
        else:
            words += [flag, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]
    return words


HARDWARE = "hardware"
RESOURCES = "resources"
MACHINES = "several processes and machines"
OUTPUT = "output"
SCRIPT = "the script"
COMPILE = "torch.compile"
DEEPSPEED = "DeepSpeed"
FSDP = "FSDP"
PARALLELISM = "a parallelism configuration"
MEGATRON = "Megatron-LM"
FP8 = "fp8"
TPU = "TPU"
AWS = "SageMaker"
MANIFESTS = "Kubernetes and SkyPilot"

GROUPS = (
    *(HARDWARE, RESOURCES, MACHINES, OUTPUT, SCRIPT, MANIFESTS, COMPILE),
    *(FSDP, PARALLELISM, DEEPSPEED, MEGATRON, FP8, TPU, AWS),
)

DYNAMO_BACKENDS = (
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt"),
    *("onnxrt", "tensorrt", "aot_torchxla_trace_once", "torhchxla_trace_once", "tvm"),  # the typo is published
)

OFFLOAD_PLACEMENTS = ("host", "disk")
DATA_ORDERS = ("one-process", "accelerate-1")

_LAUNCH = (
    Option(
        name="cpu", help="run on the CPU even if there are accelerators", group=HARDWARE, switch=True, default=False,
        read=yes_no, yaml="use_cpu", variable="ACCELERATE_USE_CPU",
    ),
    Option(name="multi_gpu", help="one process per accelerator", group=HARDWARE, switch=True, default=False),
    Option(name="tpu", help="run on TPUs, through torch_xla", group=HARDWARE, switch=True, default=False, engine=TPU),
    Option(
        name="mixed_precision", help="number format of the forward pass", group=RESOURCES,
        choices=tuple(PrecisionType.list()), yaml="mixed_precision", variable="ACCELERATE_MIXED_PRECISION",
    ),
    Option(
        name="offload_training", help="keep the repeated blocks of models here, and two of them on the device",
        group=RESOURCES, choices=OFFLOAD_PLACEMENTS, yaml="offload_training", variable="MESHWRIGHT_OFFLOAD_TRAINING",
    ),
    Option(
        name="num_processes", help="processes on all machines together; default: one per accelerator, else one",
        group=RESOURCES, read=int, yaml="num_processes",
    ),
    Option(name="num_machines", help="number of machines", group=RESOURCES, read=int, yaml="num_machines"),
    Option(
        name="num_cpu_threads_per_process", help="threads per process; by default an equal share of the cores",
        group=RESOURCES, read=int, variable="OMP_NUM_THREADS",
    ),
    Option(
        name="enable_cpu_affinity", help="pin each process to its share of the cores", group=RESOURCES, switch=True,
        default=False, read=yes_no, yaml="enable_cpu_affinity", variable="ACCELERATE_CPU_AFFINITY",
    ),
    Option(
        name="gradient_accumulation_steps", help="micro-batches per optimizer step", group=RESOURCES, read=int,
        yaml="deepspeed_config.gradient_accumulation_steps", variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ),
    Option(
        name="data_order", help="shuffled samples in the order of one process (default), or in that of accelerate 1.x",
        group=RESOURCES, choices=DATA_ORDERS, yaml="data_order", variable="MESHWRIGHT_DATA_ORDER",
    ),
    Option(
        name="gpu_ids", help='accelerators of this machine to use, as "0,1" or "all"', group=MACHINES, yaml="gpu_ids"
    ),
    Option(
        name="same_network", help="the machines share a local network; has no effect", group=MACHINES, switch=True,
        default=False, read=yes_no, yaml="same_network",
    ),
    Option(
        name="machine_rank", help="number of this machine, from 0", group=MACHINES, read=int, yaml="machine_rank",
        variable="NODE_RANK",
    ),
    Option(
        name="main_process_ip", help="address of machine 0", group=MACHINES, yaml="main_process_ip",
        variable="MASTER_ADDR",
    ),
    Option(
        name="main_process_port", help="port on machine 0; by default a free one (several machines: 29500)",
        group=MACHINES, read=int, yaml="main_process_port", variable="MASTER_PORT",
    ),
    Option(
        name="nnodes", help="MIN:MAX machines, for elastic launches (implies --rdzv_backend c10d)",
        group=MACHINES,
    ),
    Option(
        name="rdzv_backend", help="rendezvous backend: static or c10d", group=MACHINES, default="static",
        yaml="rdzv_backend",
    ),
    Option(
        name="rdzv_conf", help="settings of the rendezvous, as key=value,key=value", group=MACHINES, default="",
        yaml="rdzv_conf", variable="PET_RDZV_CONF",
    ),
    Option(name="role", help="name of the worker group, for torchelastic", group=MACHINES, default="default"),
    Option(
        name="max_restarts", help="restarts of all processes after a failure", group=MACHINES, read=int, default=0,
        yaml="max_restarts", variable="PET_MAX_RESTARTS",
    ),
    Option(
        name="survive", help="replace a process that dies, while the other replicas continue", group=MACHINES,
        switch=True, default=False, read=yes_no, yaml="survive", variable="MESHWRIGHT_SURVIVE",
    ),
    Option(
        name="replace_hung_after",
        help="with --survive: replace a process that keeps the others waiting for so many seconds",
        group=MACHINES, read=float, yaml="replace_hung_after", variable="MESHWRIGHT_REPLACE_HUNG_AFTER",
        needs="survive",
    ),
    Option(
        name="check_replicas_every", help="compare the parameters of replicas bitwise every N optimizer steps",
        group=MACHINES, read=int, yaml="check_replicas_every", variable="MESHWRIGHT_CHECK_REPLICAS_EVERY",
    ),
    Option(
        name="memory_copies_every", group=MACHINES, read=int, yaml="memory_copies_every",
        variable="MESHWRIGHT_MEMORY_COPIES_EVERY",
        help="optimizer steps between two copies of the state in host memory, from which restarted processes go on",
    ),
    Option(
        name="memory_copies_dir", group=MACHINES, yaml="memory_copies_dir", variable="MESHWRIGHT_MEMORY_COPIES_DIR",
        needs="memory_copies_every",
        help="folder of the copies, which a later launch finds; default: one in /dev/shm for this launch only",
    ),
    Option(
        name="monitor_interval", help="seconds between two checks of the processes", group=MACHINES, read=float,
        default=0.1, yaml="monitor_interval",
    ),
    Option(
        name="grace_period", help="seconds to save and exit after Ctrl-C or SIGTERM, before SIGKILL", group=MACHINES,
        read=float, default=30.0, yaml="grace_period",
    ),
    Option(
        name="mpirun_hostfile", help="start the processes with mpirun on the hosts of this file", group=MACHINES,
        yaml="mpirun_config.mpirun_hostfile",
    ),
    Option(
        name="ray", help="run the processes on the nodes of a Ray cluster, one actor per rank", group=MACHINES,
        switch=True, default=False,
    ),
    Option(
        name="ray_address", group=MACHINES, needs="ray",
        help="with --ray: address of the cluster; default: the one of this node, else a local one is started",
    ),
    Option(
        name="ray_resources", group=MACHINES, needs="ray",
        help="with --ray: resources of each process, as CPU=4,GPU=1; default: one CPU, and one GPU if there are any",
    ),
    Option(
        name="ray_min_processes", group=MACHINES, read=int, needs="ray",
        help="with --ray: start with so many processes if there is no room for --num_processes",
    ),
    Option(
        name="log_dir", help="folder for the output of every rank; the terminal then shows the main process only",
        group=OUTPUT, yaml="log_dir",
    ),
    Option(
        name="tee", short=("-t",), default="0", group=OUTPUT,
        help="also show on the terminal, each line with its rank: 1 stdout, 2 stderr, 3 both; 0:3,1:1 by local rank",
    ),
    Option(
        name="redirects", short=("-r",), default="0", group=OUTPUT,
        help="write to files in --log_dir instead of the terminal; values as for --tee",
    ),
    Option(
        name="quiet", short=("-q",), switch=True, group=OUTPUT, help="report a failure in one line instead of a panel"
    ),
    Option(
        name="instruments", group=OUTPUT, variable="MESHWRIGHT_INSTRUMENTS",
        help="let these see the loop of every Accelerator: module:Class, derived from Instrument; several by commas",
    ),
    Option(
        name="debug", switch=True, group=OUTPUT, read=yes_no, yaml="debug", variable="ACCELERATE_DEBUG_MODE",
        help="check every collective operation across ranks, and show torchelastic's log",
    ),
    Option(
        name="debug_rank", read=int, group=OUTPUT, variable="MESHWRIGHT_DEBUG_RANK",
        help="give this rank the terminal: breakpoint() and an exception open the debugger there, the others wait",
    ),
    Option(
        name="explain", switch=True, default=False, group=OUTPUT,
        help="print every setting with its origin and the plan of processes, and start nothing",
    ),
    Option(
        name="lenient", switch=True, default=False, group=OUTPUT,
        help="launch even if the configuration file has a key that looks misspelt",
    ),
    Option(name="module", short=("-m",), switch=True, group=SCRIPT, help="the script is a module, as for python -m"),
    Option(name="no_python", switch=True, group=SCRIPT, help="the script is an executable program, not Python"),
    Option(
        name="main_training_function", group=SCRIPT, yaml="main_training_function",
        help="with --tpu: call this function of the script in a process for every device, which torch_xla starts",
    ),
)  # fmt: skip

_MANIFESTS = (
    Option(
        name="kubernetes", switch=True, default=False, group=MANIFESTS, engine=MANIFESTS,
        help="with --dry_run: print the job for a Kubernetes cluster, for kubectl apply",
    ),
    Option(
        name="kubernetes_kind", choices=("TrainJob", "JobSet"), default="TrainJob", group=MANIFESTS, engine=MANIFESTS,
        help="a TrainJob of Kubeflow Trainer 2 with its runtime, or a JobSet",
    ),
    Option(
        name="skypilot", switch=True, default=False, group=MANIFESTS, engine=MANIFESTS,
        help="with --dry_run: print the task for sky jobs launch",
    ),
    Option(name="dry_run", switch=True, default=False, group=MANIFESTS, engine=MANIFESTS, help="print, start nothing"),
    Option(name="job_name", group=MANIFESTS, engine=MANIFESTS, help="name of the job; default: that of the script"),
    Option(name="image", group=MANIFESTS, engine=MANIFESTS, help="container image with the script and its packages"),
    Option(
        name="accelerators", group=MANIFESTS, engine=MANIFESTS,
        help="NAME:NUMBER per machine, as nvidia.com/gpu:8 or, for SkyPilot, A100:8",
    ),
    Option(
        name="storage", group=MANIFESTS, engine=MANIFESTS,
        help="SOURCE:/PATH of the checkpoints: a PersistentVolumeClaim, or SkyPilot's bucket",
    ),
)  # fmt: skip

_COMPILE = (
    Option(
        name="dynamo_backend", help="compile the model with this backend", group=COMPILE, choices=DYNAMO_BACKENDS,
        read=lambda word: word.lower(), yaml="dynamo_config.dynamo_backend", variable="ACCELERATE_DYNAMO_BACKEND",
        engine=COMPILE,
    ),
    Option(
        name="dynamo_mode", help="optimisation mode of torch.compile", group=COMPILE, default="default",
        choices=("default", "reduce-overhead", "max-autotune"), yaml="dynamo_config.dynamo_mode",
        variable="ACCELERATE_DYNAMO_MODE", engine=COMPILE,
    ),
    *(
        Option(
            name=f"dynamo_{name}", help=text, group=COMPILE, switch=True, default=False, read=yes_no,
            yaml=f"dynamo_config.dynamo_{name}", variable=f"ACCELERATE_DYNAMO_{name.upper()}", engine=COMPILE,
        )
        for name, text in {
            "use_fullgraph": "refuse graph breaks",
            "use_dynamic": "compile for changing shapes",
            "use_regional_compilation": "compile the repeated blocks only",
        }.items()
    ),
)  # fmt: skip


def _rows(engine: str, section: str, prefix: str, rows: Mapping[str, tuple[Any, ...]]) -> tuple[Option, ...]:
    """Make the options of one engine: name -> (help, default, reader, choices), with the engine's usual spellings."""
    return tuple(
        Option(
            name=name,
            help=row[0],
            default=row[1] if len(row) > 1 else None,
            read=row[2] if len(row) > 2 else str,
            choices=row[3] if len(row) > 3 else None,
            group=engine,
            yaml=f"{section}.{name}",
            variable=f"{prefix}{name.upper()}",
            engine=engine,
        )
        for name, row in rows.items()
    )


def _use(name: str, engine: str) -> Option:
    return Option(
        name=name,
        help=f"use {engine}",
        group=engine,
        switch=True,
        default=False,
        read=yes_no,
        variable=f"ACCELERATE_{name.upper()}",
        engine=engine,
    )


_FSDP = (
    _use("use_fsdp", FSDP),
    *_rows(FSDP, "fsdp_config", "", {
        "fsdp_version": ("FSDP version", "1", str, ("1", "2")),
        "fsdp_offload_params": ("keep parameters and gradients on the CPU", "false"),
        "fsdp_min_num_params": ("shard every module with at least this many parameters", 100_000_000, int),
        "fsdp_sharding_strategy": ("what to shard (FSDP1)", "FULL_SHARD"),
        "fsdp_reshard_after_forward": ("free gathered parameters after the forward pass", "true"),
        "fsdp_auto_wrap_policy": ("how to choose the sharded modules",),
        "fsdp_backward_prefetch": ("when to gather for the backward pass (FSDP1)",),
        "fsdp_state_dict_type": ("format of saved states",),
        "fsdp_forward_prefetch": ("gather the next module early (FSDP1)", "false"),
        "fsdp_use_orig_params": ("keep the original parameters (FSDP1)", "true"),
        "fsdp_cpu_ram_efficient_loading": ("load weights on the first process only", "true"),
        "fsdp_sync_module_states": ("broadcast the weights of the first process", "true"),
        "fsdp_activation_checkpointing": ("recompute activations in the backward pass", "false"),
        "fsdp_activation_checkpointing_offload": ("keep the saved activations on the CPU", "false"),
    }),
    Option(
        name="fsdp_transformer_layer_cls_to_wrap", help="block classes to shard", group=FSDP, engine=FSDP,
        yaml="fsdp_config.fsdp_transformer_layer_cls_to_wrap", variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
)  # fmt: skip

_PARALLELISM = (
    _use("use_parallelism_config", PARALLELISM),
    *_rows(PARALLELISM, "parallelism_config", "", {
        "parallelism_config_dp_replicate_size": ("number of replicas of the sharded model", 1, int),
        "parallelism_config_dp_shard_size": ("processes that share one replica", 1, int),
        "parallelism_config_tp_size": ("processes that split each layer", 1, int),
        "parallelism_config_cp_size": ("processes that split each sequence", 1, int),
        "parallelism_config_pp_size": ("processes that each hold some of the layers", 1, int),
        "parallelism_config_ep_size": ("processes that hold all experts between them", 1, int),
        "parallelism_config_cp_backend": ("engine of context parallelism", "torch", str, ("torch",)),
        "parallelism_config_cp_comm_strategy": ("how keys and values are exchanged", "allgather"),
        "parallelism_config_sp_size": ("processes of sequence parallelism", 1, int),
        "parallelism_config_sp_backend": ("engine of sequence parallelism", "deepspeed", str, ("deepspeed",)),
        "parallelism_config_sp_seq_length": ("sequence length",),
        "parallelism_config_sp_seq_length_is_variable": ("sequence lengths change", True, yes_no),
        "parallelism_config_sp_attn_implementation": ("attention of sequence parallelism", "sdpa"),
    }),
)  # fmt: skip

_DEEPSPEED = (
    _use("use_deepspeed", DEEPSPEED),
    *_rows(DEEPSPEED, "deepspeed_config", "ACCELERATE_DEEPSPEED_", {
        "zero_stage": ("ZeRO stage, 0 to 3", None, int),
        "offload_optimizer_device": ("device for optimizer states: none, cpu, nvme",),
        "offload_param_device": ("device for parameters: none, cpu, nvme",),
        "offload_optimizer_nvme_path": ("folder of offloaded optimizer states",),
        "offload_param_nvme_path": ("folder of offloaded parameters",),
        "zero3_save_16bit_model": ("gather 16-bit weights when saving under ZeRO-3",),
    }),
    *(
        Option(name=name, help=text, group=DEEPSPEED, engine=DEEPSPEED, yaml=f"deepspeed_config.{name}",
               variable=variable, read=reader)
        for name, variable, text, reader in (
            ("deepspeed_config_file", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "DeepSpeed's own JSON file", str),
            ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", "largest norm of the gradients", float),
            ("zero3_init_flag", "ACCELERATE_DEEPSPEED_ZERO3_INIT", "build the model in shards (ZeRO-3)", str),
            ("deepspeed_hostfile", None, "the machines, in DeepSpeed's hostfile format", str),
            ("deepspeed_exclusion_filter", None, "machines or devices to exclude", str),
            ("deepspeed_inclusion_filter", None, "machines or devices to use", str),
            ("deepspeed_multinode_launcher", None, "how other machines are started", str),
            ("deepspeed_moe_layer_cls_names", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "MoE leaf modules", str),
        )
    ),
)  # fmt: skip

_MEGATRON = (
    _use("use_megatron_lm", MEGATRON),
    *_rows(MEGATRON, "megatron_lm_config", "", {
        "megatron_lm_tp_degree": ("tensor parallel size", 1, int),
        "megatron_lm_use_custom_fsdp": ("Megatron's FSDP", False, yes_no),
        "megatron_lm_no_load_optim": ("do not load the optimizer", False, yes_no),
        "megatron_lm_eod_mask_loss": ("no loss at document ends", False, yes_no),
        "megatron_lm_overlap_cpu_optimizer_d2h_h2d": ("overlap copies of the CPU optimizer", False, yes_no),
        "megatron_lm_no_save_optim": ("do not save the optimizer", False, yes_no),
        "megatron_lm_optimizer_cpu_offload": ("optimizer on the CPU", False, yes_no),
        "megatron_lm_use_precision_aware_optimizer": ("precision-aware optimizer", False, yes_no),
        "megatron_lm_decoder_last_pipeline_num_layers": ("layers of the last stage", None, int),
        "megatron_lm_pp_degree": ("pipeline parallel size", 1, int),
        "megatron_lm_num_micro_batches": ("micro-batches in flight", None, int),
        "megatron_lm_sequence_parallelism": ("sequence parallelism",),
        "megatron_lm_recompute_activations": ("recompute activations",),
        "megatron_lm_use_distributed_optimizer": ("shard the optimizer",),
        "megatron_lm_gradient_clipping": ("largest norm of the gradients", 1.0, float),
        "megatron_lm_recompute_granularity": ("what to recompute",),
        "megatron_lm_recompute_method": ("how to choose what is recomputed",),
        "megatron_lm_recompute_num_layers": ("layers to recompute", None, int),
        "megatron_lm_attention_backend": ("attention kernel",),
        "megatron_lm_expert_model_parallel_size": ("expert parallel size", None, int),
        "megatron_lm_context_parallel_size": ("context parallel size", None, int),
        "megatron_lm_attention_dropout": ("dropout of the attention", None, float),
        "megatron_lm_hidden_dropout": ("dropout of the hidden layers", None, float),
        "megatron_lm_attention_softmax_in_fp32": ("softmax in fp32",),
        "megatron_lm_expert_tensor_parallel_size": ("tensor parallel size of experts", None, int),
        "megatron_lm_calculate_per_token_loss": ("loss per token",),
        "megatron_lm_use_rotary_position_embeddings": ("rotary positions",),
    }),
)  # fmt: skip

_FP8 = tuple(
    Option(
        name=f"fp8_{name}", help=text, group=FP8, default=default, read=reader, choices=choices, engine=FP8,
        switch=reader is yes_no and default is False, yaml=f"fp8_config.{key}",
        variable=None if name == "override_linear_precision" else f"ACCELERATE_FP8_{name.upper()}",
    )
    for name, key, text, default, reader, choices in (
        ("backend", "backend", "fp8 library", None, str, ("ao", "te", "msamp")),
        ("use_autocast_during_eval", "use_autocast_during_eval", "use fp8 in evaluation too", False, yes_no, None),
        ("margin", "margin", "margin of the scaling factor", 0, int, None),
        ("interval", "interval", "steps between two scalings", 1, int, None),
        ("format", "fp8_format", "number format", "HYBRID", str, ("HYBRID", "E4M3", "E5M2")),
        ("amax_history_len", "amax_history_len", "length of the history of maxima", 1024, int, None),
        ("amax_compute_algo", "amax_compute_algo", "choice of the maximum", "most_recent", str, ("max", "most_recent")),
        ("override_linear_precision", "override_linear_precision", "fprop,dgrad,wgrad in higher precision",
         (False, False, False), three_yes_no, None),
        ("opt_level", "opt_level", "MS-AMP's level", "O2", str, ("O1", "O2")),
        ("enable_fsdp_float8_all_gather", "enable_fsdp_float8_all_gather", "gather shards in fp8", True, yes_no, None),
        ("pad_inner_dim", "pad_inner_dim", "pad inner dimensions to multiples of 16", True, yes_no, None),
    )
)  # fmt: skip

_ELSEWHERE = (
    Option(name="tpu_use_cluster", spelled="tpu_cluster", negation="no_tpu_cluster", help="a TPU pod", group=TPU,
           switch=True, default=False, engine=TPU, read=yes_no, yaml="tpu_use_cluster"),
    Option(name="tpu_use_sudo", help="sudo on the TPU hosts", group=TPU, switch=True, default=False, engine=TPU,
           read=yes_no, yaml="tpu_use_sudo"),
    Option(name="vm", help="a TPU host", group=TPU, repeated=True, engine=TPU, yaml="tpu_vm"),
    Option(name="env", help="a variable for the TPU hosts", group=TPU, repeated=True, engine=TPU, yaml="tpu_env"),
    Option(name="downcast_bf16", help="with bf16: store fp32 as bf16, and double as fp32", group=TPU, switch=True,
           default=False, engine=TPU, read=yes_no, yaml="downcast_bf16", variable="ACCELERATE_DOWNCAST_BF16"),
    Option(name="aws_access_key_id", help="AWS key", group=AWS, engine=AWS),
    Option(name="aws_secret_access_key", help="AWS secret", group=AWS, engine=AWS),
)  # fmt: skip

OPTIONS = (*_LAUNCH, *_MANIFESTS, *_COMPILE, *_FSDP, *_PARALLELISM, *_DEEPSPEED, *_MEGATRON, *_FP8, *_ELSEWHERE)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
MESH_AXES: Mapping[str, str] = {
    "dp": "parallelism_config_dp_replicate_size",
    "fsdp": "parallelism_config_dp_shard_size",
    **{size.removesuffix("_size"): f"parallelism_config_{size}" for size in PARALLELISM_SIZES},
}
"""Axis of `--mesh dp=4,tp=2` -> the option of its size."""
USUAL = (
    *("cpu", "mixed_precision", "num_processes", "gradient_accumulation_steps", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "gpu_ids", "max_restarts", "survive", "log_dir", "quiet", "debug"),
    *("explain", "module", "use_fsdp", "fsdp_version"),
)
"""The options that `meshwright launch --help` shows beside `--mesh`; `--help-all` shows the others too."""
_SECOND_SPELLINGS = {
    "fp8_config.amax_history_length": "fp8_amax_history_len",
    "fp8_config.amax_compute_algorithm": "fp8_amax_compute_algo",
    "fp8_config.optimization_level": "fp8_opt_level",
}
BY_YAML_KEY: Mapping[str, Option] = {option.yaml: option for option in OPTIONS if option.yaml is not None} | {
    key: BY_NAME[name] for key, name in _SECOND_SPELLINGS.items()
}
