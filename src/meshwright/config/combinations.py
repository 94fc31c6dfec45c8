"""What goes with what: the one table of settings that cannot be used together, for the errors and for the page.

[Note: combinations] A *feature* is a setting, or a call, that changes how a model is trained. Features that are in use
are looked up in `REFUSED` before anything is started. What depends on the model, the optimizer or the numbers is not
here: it is refused where it is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from ..errors import UnsupportedSettingError


class Feature(Enum):
    """A setting or a call, by the words of the page."""

    DDP_OPTIONS = "DDP's options"
    FSDP = "FSDP"
    FSDP_CPU_OFFLOAD = "cpu_offload=True"
    IGNORED_MODULES = "ignored_modules"
    CPU_RAM_EFFICIENT = "cpu_ram_efficient_loading=True"
    DEEPSPEED = "DeepSpeed"
    MEGATRON = "MegatronLMPlugin"
    DP_SHARD = "dp_shard_size"
    TP = "tp_size"
    CP = "cp_size"
    SP = "sp_size"
    PP = "pp_size"
    EP = "ep_size"
    SEQUENCE_PARALLEL = "TorchTensorParallelConfig(sequence_parallel=True)"
    OFFLOAD = "offload"
    FP16 = "mixed_precision='fp16'"
    FP8 = "mixed_precision='fp8'"
    COMPILE = "torch.compile"
    XLA = "XLA"
    SURVIVE = "--survive"
    MEMORY_COPIES = "--memory_copies_every"
    ACCUMULATION = "gradient_accumulation_steps > 1"
    STEP_IN_BACKWARD = "step_in_backward"
    LOCAL_SGD = "LocalSGD"
    ASLEEP = "accelerator.asleep()"
    FIT_BATCH_SIZE = "fit_batch_size"
    PLAN = "meshwright plan"
    CHECK_MESH = "meshwright check --mesh"


class Refused(NamedTuple):
    """A feature that cannot be used with any of some others, why, and what to do."""

    feature: Feature
    others: tuple[Feature, ...]
    reason: str
    remedy: str = "Leave one out."


_F = Feature
_MODEL_AXES = (_F.TP, _F.CP, _F.SP, _F.PP, _F.EP)
"""The axes whose processes share one model in another way than by FSDP."""

REFUSED = (
    # --- where blocks are kept on the host ----------------------------------------------------------------------------
    Refused(
        _F.OFFLOAD,
        (_F.FSDP,),
        "FSDP moves its shards itself: FullyShardedDataParallelPlugin(cpu_offload=True).",
    ),
    Refused(
        _F.OFFLOAD,
        (_F.DEEPSPEED,),
        "DeepSpeed offloads by its own settings (offload_param, offload_optimizer).",
    ),
    Refused(_F.OFFLOAD, (_F.DP_SHARD, *_MODEL_AXES), "it keeps whole blocks of a replica on the host."),
    Refused(_F.OFFLOAD, (_F.SURVIVE,), "a process that is replaced would need the blocks on the host, too."),
    Refused(_F.OFFLOAD, (_F.XLA,), "its operations are recorded, and not executed in streams."),
    Refused(_F.OFFLOAD, (_F.FP8,), "fp8 layers keep scales beside their weights."),
    Refused(_F.OFFLOAD, (_F.FP16,), "torch's scaler expects all gradients on the device."),
    Refused(
        _F.OFFLOAD,
        (_F.COMPILE,),
        "offloaded blocks compute with other parameters than those they were compiled with.",
        "Leave torch.compile out.",
    ),
    # --- XLA ----------------------------------------------------------------------------------------------------------
    Refused(_F.XLA, (_F.DEEPSPEED,), "DeepSpeed has no XLA backend.", "Use fsdp_plugin."),
    Refused(_F.XLA, (_F.EP,), "tokens travel by an all-to-all of torch.distributed.", "Leave it out."),
    Refused(
        _F.XLA,
        (_F.TP, _F.CP, _F.SP, _F.PP),
        "a mesh of XLA devices has the axes dp_replicate and dp_shard only.",
        "Leave the other axes out.",
    ),
    Refused(_F.XLA, (_F.COMPILE,), "XLA compiles every step as a whole.", "Leave torch.compile out."),
    Refused(_F.XLA, (_F.FP8,), "torchao does not know it.", "Use bf16."),
    Refused(_F.XLA, (_F.MEMORY_COPIES,), "one process has the state of all XLA devices.", "Leave the copies out."),
    # --- axes of one mesh ---------------------------------------------------------------------------------------------
    Refused(
        _F.CP,
        (_F.SP,),
        "sequences are divided over one axis, and Ulysses (sp_size) needs whole models.",
        "Use cp_size for both.",
    ),
    Refused(
        _F.PP,
        (_F.SP,),
        "sequences are divided over one axis, and Ulysses (sp_size) needs whole models.",
        "Use cp_size with pp_size.",
    ),
    Refused(
        _F.EP,
        (_F.PP,),
        "experts are spread over the processes that share a whole model.",
        "Use dp_shard_size, tp_size or cp_size instead of pp_size.",
    ),
    Refused(
        _F.EP,
        (_F.SEQUENCE_PARALLEL,),
        "experts take whole sequences, which processes along the tp axis share.",
        "Leave sequence_parallel out.",
    ),
    Refused(_F.PP, (_F.FP16,), "the stages would have to agree on every overflow.", "Use bf16."),
    Refused(
        _F.CPU_RAM_EFFICIENT,
        (_F.PP,),
        "every process needs the weights of its own stage.",
        "Load the model on every process.",
    ),
    Refused(
        _F.CPU_RAM_EFFICIENT,
        (_F.TP,),
        "layers are split before the first process hands out its weights.",
        "Load the model on every process.",
    ),
    Refused(
        _F.CPU_RAM_EFFICIENT,
        (_F.EP,),
        "experts are spread before the first process hands out its weights.",
        "Load the model on every process.",
    ),
    # --- DeepSpeed ----------------------------------------------------------------------------------------------------
    Refused(_F.DEEPSPEED, (_F.FSDP,), "both shard a model.", "Give fsdp_plugin or deepspeed_plugin, not both."),
    Refused(
        _F.DEEPSPEED,
        _MODEL_AXES,
        "DeepSpeed lays out the processes itself.",
        "Say it in DeepSpeed's config, or leave the deepspeed_plugin out.",
    ),
    Refused(_F.DEEPSPEED, (_F.MEMORY_COPIES,), "its engine writes files of its own."),
    # --- members that come and go -------------------------------------------------------------------------------------
    Refused(_F.SURVIVE, (_F.FP16, _F.FP8), "its scales are not part of the step's transaction.", "Use bf16."),
    Refused(
        _F.SURVIVE,
        (_F.DEEPSPEED, *_MODEL_AXES, _F.DDP_OPTIONS),
        "it replaces whole copies of a model, each on one process or sharded by FSDP.",
        "Leave it out.",
    ),
    Refused(_F.SURVIVE, (_F.FSDP_CPU_OFFLOAD,), "it was not tried.", "Leave it out."),
    Refused(
        _F.SURVIVE,
        (_F.IGNORED_MODULES,),
        "their gradients are not part of the step's transaction.",
        "Leave it out.",
    ),
    Refused(_F.SURVIVE, (_F.XLA,), "one process drives all devices of a host.", "Use --max_restarts."),
    Refused(_F.SURVIVE, (_F.COMPILE,), "compiled models were not tried with it.", "Leave it out."),
    # --- calls --------------------------------------------------------------------------------------------------------
    Refused(_F.LOCAL_SGD, (_F.SURVIVE,), "its replicas differ between two averages."),
    Refused(
        _F.LOCAL_SGD,
        (_F.MEMORY_COPIES,),
        "one copy is kept for all replicas, and these differ between two averages.",
    ),
    Refused(_F.STEP_IN_BACKWARD, (_F.FP16,), "gradients are unscaled after the backward pass."),
    Refused(_F.STEP_IN_BACKWARD, (_F.ACCUMULATION,), "gradients of several passes add up before a step."),
    Refused(
        _F.ASLEEP, (_F.DEEPSPEED,), "its engine keeps weights and states in memory of its own.", "Use fsdp_plugin."
    ),
    Refused(
        _F.ASLEEP,
        (_F.OFFLOAD, _F.FSDP_CPU_OFFLOAD),
        "the weights are on the host already, and what is on the device is managed elsewhere.",
    ),
    Refused(_F.ASLEEP, (_F.XLA,), "its tensors have no memory that could be freed and filled."),
    Refused(_F.ASLEEP, (_F.SURVIVE,), "a replacement would take its state from a member that sleeps."),
    Refused(_F.ASLEEP, (_F.MEMORY_COPIES,), "the copies read the state in the background; it was not tried."),
    Refused(_F.ASLEEP, (_F.FP8,), "fp8 layers keep scales beside their weights.", "Use bf16."),
    Refused(_F.ASLEEP, (_F.COMPILE,), "compiled models may keep addresses of their weights; it was not tried."),
    Refused(_F.ASLEEP, (_F.STEP_IN_BACKWARD,), "it was not tried."),
    Refused(
        _F.FIT_BATCH_SIZE,
        (_F.DEEPSPEED,),
        "its engine fixes the batch size when it is made.",
        "Choose the batch size by `meshwright plan`.",
    ),
    Refused(
        _F.FIT_BATCH_SIZE,
        (_F.MEGATRON,),
        "it counts micro-batches itself.",
        "Choose the batch size by `meshwright plan`.",
    ),
    Refused(
        _F.FIT_BATCH_SIZE,
        (_F.PP,),
        "a stage cannot run without the others.",
        "Choose the batch size by `meshwright plan`.",
    ),
    Refused(
        _F.FIT_BATCH_SIZE,
        (_F.SURVIVE,),
        "members that come and go assign micro-batches themselves.",
        "Choose the batch size by `meshwright plan`.",
    ),
    Refused(
        _F.FIT_BATCH_SIZE,
        (_F.XLA,),
        "memory runs out when a whole step is executed, on all processes.",
        "Choose the batch size by `meshwright plan`.",
    ),
    # --- tools --------------------------------------------------------------------------------------------------------
    Refused(
        _F.PLAN,
        (_F.DEEPSPEED,),
        "its engine needs devices.",
        "Plan the script with --use_fsdp: stage 3 shards as FSDP does, stage 2 as reshard_after_forward=False.",
    ),
    Refused(
        _F.PLAN,
        (_F.EP,),
        "how many tokens each process gets depends on the numbers of the router.",
        "Plan the script with ep_size=1: its experts then are sharded, and gathered for each use.",
    ),
    Refused(
        _F.CHECK_MESH,
        (_F.DEEPSPEED,),
        "its engine does not show the gradients of a step.",
        "Check the script with fsdp_plugin.",
    ),
)


def refused_pairs() -> Iterator[tuple[Feature, Feature, Refused]]:
    """Yield every pair that cannot be used together, with its row."""
    for row in REFUSED:
        for other in row.others:
            yield row.feature, other, row


def require_combination(in_use: Mapping[Feature, str]) -> None:
    """Raise unless all features that are in use go together.

    Args:
        in_use: The features, and how they were set, as the message is to name them.
    """
    for feature, other, row in refused_pairs():
        if feature in in_use and other in in_use:
            raise UnsupportedSettingError(f"{in_use[feature]} with {in_use[other]}", row.reason, row.remedy)
