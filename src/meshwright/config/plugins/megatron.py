"""`MegatronLMPlugin`: Megatron-LM's settings, translated to a mesh of torch's engines, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import UnsupportedSettingError
from ..environment import read_megatron
from .parallelism import REST, ParallelismConfig, PipelineConfig, TorchTensorParallelConfig
from .sharding import FullyShardedDataParallelPlugin

logger = logging.getLogger(__name__)


@dataclass
class MegatronLMPlugin:
    """Distribute a model as Megatron-LM would, by torch's own engines; Megatron-LM itself is not needed.

    The fields are the published ones. `translation()` says what each becomes. A field that is left out comes from the
    environment (`MEGATRON_LM_TP_DEGREE` and so on) where a variable exists, or has its default. What has no
    counterpart here raises an error that names it.
    """

    tp_degree: int | None = None
    """Processes that split each layer: `tp_size`. The model needs a plan, as models of transformers have."""
    pp_degree: int | None = None
    """Processes that each hold some of the layers: `pp_size`. The loop uses `forward_backward`."""
    use_custom_fsdp: bool | None = None
    """Shard the rest of the processes by FSDP2, and free gathered parameters after the forward pass."""
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    """Has no effect: it is about speed, and FSDP2 decides."""
    no_load_optim: bool | None = None
    """Refused: `load_state` loads what the checkpoint has."""
    eod_mask_loss: bool | None = None
    """Refused: mask labels by -100."""
    no_save_optim: bool | None = None
    """Refused: `save_state` saves optimizers; `save_model` saves weights only."""
    optimizer_cpu_offload: bool | None = None
    """Keep shards of parameters, gradients and optimizer states on the host."""
    use_precision_aware_optimizer: bool | None = None
    """Refused: optimizer states have the precision of the parameters."""
    decoder_last_pipeline_num_layers: int | None = None
    """Refused: name the stages by `PipelineConfig(split_at=...)`."""
    recompute_granularity: str | None = None
    """"full" or "selective": either recomputes every block."""
    recompute_method: str | None = None
    """Has no effect: every block is recomputed by itself."""
    recompute_num_layers: int | None = None
    """Has no effect: every block is recomputed by itself."""
    attention_backend: str | None = None
    """Refused: the model chooses its attention."""
    expert_model_parallel_size: int | None = None
    """Processes that hold all experts between them: `ep_size`. The model needs a plan of its experts."""
    context_parallel_size: int | None = None
    """Processes that split each sequence: `cp_size`. The loop uses `maybe_context_parallel`."""
    attention_dropout: float | None = None
    """Refused: it is part of the model."""
    hidden_dropout: float | None = None
    """Refused: it is part of the model."""
    attention_softmax_in_fp32: bool | None = None
    """Refused: it is part of the model."""
    expert_tensor_parallel_size: int | None = None
    """1. More is refused: experts are split by the model's plan."""
    calculate_per_token_loss: bool | None = None
    """Refused: pass the sum of the losses and `num_items`."""
    use_rotary_position_embeddings: bool | None = None
    """Refused: it is part of the model."""
    num_micro_batches: int | None = None
    """Micro-batches per step. A prepared loader returns this many of its own batches at once."""
    gradient_clipping: float | None = None
    """Largest norm of the gradients, applied before every optimizer step; 0 does not clip. The default is 1.0."""
    sequence_parallelism: bool | None = None
    """Split sequences where layers are not split; it has no effect without `tp_degree`."""
    recompute_activations: bool | None = None
    """Recompute the activations of every block in the backward pass."""
    use_distributed_optimizer: bool | None = None
    """Shard the rest of the processes by FSDP2, instead of copies: `dp_shard_size`."""
    pipeline_model_parallel_split_rank: int | None = None
    """Refused: it is for encoders and decoders of Megatron's own."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of a stage where each process has several stages: the interleaved schedule."""
    is_train_batch_min: bool = True
    """Whether `global_batch_size` is that of the loader with the smallest batches, or of that with the largest."""
    train_iters: int | None = None
    """Has no effect: the script's loop decides."""
    train_samples: int | None = None
    """Has no effect: the script's loop decides."""
    weight_decay_incr_style: str = "constant"
    """"constant". Others are refused."""
    start_weight_decay: float | None = None
    """Refused: set `weight_decay` of the optimizer."""
    end_weight_decay: float | None = None
    """Refused: set `weight_decay` of the optimizer."""
    lr_decay_style: str = "linear"
    """How `MegatronLMDummyScheduler` decays the learning rate: "linear", "cosine" or "constant"."""
    lr_decay_iters: int | None = None
    """Refused: give `MegatronLMDummyScheduler` its `total_num_steps`."""
    lr_decay_samples: int | None = None
    """Refused: give `MegatronLMDummyScheduler` its `total_num_steps`."""
    lr_warmup_iters: int | None = None
    """Refused: give `MegatronLMDummyScheduler` its `warmup_num_steps`."""
    lr_warmup_samples: int | None = None
    """Refused: give `MegatronLMDummyScheduler` its `warmup_num_steps`."""
    lr_warmup_fraction: float | None = None
    """Fraction of the steps of `MegatronLMDummyScheduler` that are its warm-up."""
    min_lr: float = 0
    """The last learning rate of `MegatronLMDummyScheduler`."""
    consumed_samples: list[int] | None = None
    """Has no effect: a prepared loader knows its position, and `load_state` restores it."""
    no_wd_decay_cond: Callable[..., Any] | None = None
    """Refused: make parameter groups of the optimizer."""
    scale_lr_cond: Callable[..., Any] | None = None
    """Refused: make parameter groups of the optimizer."""
    lr_mult: float = 1.0
    """1.0. Others are refused: make parameter groups of the optimizer."""
    megatron_dataset_flag: bool = False
    """Refused if true: data come from the script's own loaders."""
    seq_length: int | None = None
    """Has no effect: sequences are as long as the batches."""
    encoder_seq_length: int | None = None
    """Has no effect: sequences are as long as the batches."""
    decoder_seq_length: int | None = None
    """Has no effect: sequences are as long as the batches."""
    tensorboard_dir: str | None = None
    """Has no effect: use `log_with="tensorboard"`."""
    set_all_logging_options: bool = False
    """Has no effect: use `log_with`."""
    eval_iters: int = 100
    """Has no effect: the script's loop decides."""
    eval_interval: int = 1000
    """Has no effect: the script's loop decides."""
    return_logits: bool = False
    """Has no effect: a model returns what it returns."""
    custom_train_step_class: Any = None
    """Refused: the step is the script's own."""
    custom_train_step_kwargs: dict[str, Any] | None = None
    """Refused: the step is the script's own."""
    custom_model_provider_function: Callable[..., Any] | None = None
    """Refused: the model is the script's own."""
    custom_prepare_model_function: Callable[..., Any] | None = None
    """Refused: the model is the script's own."""
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    """Refused: data come from the script's own loaders."""
    custom_get_batch_function: Callable[..., Any] | None = None
    """Refused: data come from the script's own loaders."""
    custom_loss_function: Callable[..., Any] | None = None
    """Refused: give `forward_backward` the function as `loss_fn`."""
    other_megatron_args: dict[str, Any] | None = None
    """Refused: nobody reads Megatron's own arguments."""

    def __post_init__(self) -> None:
        for name, value in read_megatron().items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name, default in _FILLED.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"MegatronLMPlugin({name}={size!r}): expected a whole number, 1 or more.")
        if self.lr_decay_style not in LR_DECAY_STYLES:
            raise UnsupportedSettingError(
                f"MegatronLMPlugin(lr_decay_style={self.lr_decay_style!r})",
                f"MegatronLMDummyScheduler has {', '.join(LR_DECAY_STYLES)}.",
                "Choose one of these, or use a scheduler of torch.",
            )
        for name in filter(self._is_set, _REFUSED):
            raise UnsupportedSettingError(f"MegatronLMPlugin({name}={getattr(self, name)!r})", *_REFUSED[name])
        self.micro_batch_size: int | None = None
        self.data_parallel_size: int | None = None
        self.global_batch_size: int | None = None
        """Samples per optimizer step over all processes; known after `prepare` of a loader."""

    def _is_set(self, name: str) -> bool:
        """Return whether any field is set."""
        return getattr(self, name) not in (_DEFAULTS[name], _FILLED.get(name), False)

    @property
    def shards(self) -> bool:
        """Return whether the processes that see different samples share one copy."""
        return bool(self.use_distributed_optimizer or self.use_custom_fsdp)

    @property
    def recomputes(self) -> bool:
        """Return whether blocks are recomputed in the backward pass."""
        return bool(self.recompute_activations or self.recompute_granularity)

    @property
    def max_norm(self) -> float | None:
        """Return the largest norm of the gradients, or None where they are not clipped."""
        return self.gradient_clipping or None

    def parallelism(self) -> ParallelismConfig:
        """Return the mesh; processes that no axis takes see different samples."""
        splits = TorchTensorParallelConfig(sequence_parallel=bool(self.sequence_parallelism))
        return ParallelismConfig(
            dp_replicate_size=1 if self.shards else REST,
            dp_shard_size=REST if self.shards else 1,
            tp_size=self.tp_degree,
            cp_size=self.context_parallel_size,
            pp_size=self.pp_degree,
            sp_size=1,
            ep_size=self.expert_model_parallel_size,
            tp_handler=splits if _count(self.tp_degree) > 1 else None,
            pp_handler=self._pipeline() if _count(self.pp_degree) > 1 else None,
        )

    def _pipeline(self) -> PipelineConfig:
        count = _count(self.num_micro_batches)
        if self.num_layers_per_virtual_pipeline_stage is not None:
            layers = self.num_layers_per_virtual_pipeline_stage
            return PipelineConfig(schedule="interleaved", microbatches=count, layers_per_stage=layers)
        return PipelineConfig(schedule="1f1b" if count >= _count(self.pp_degree) else "gpipe", microbatches=count)

    def sharding(self) -> FullyShardedDataParallelPlugin | None:
        """Return the settings of FSDP2, or None where they are not needed."""
        if not (self.shards or self.recomputes or self.optimizer_cpu_offload):
            return None
        return FullyShardedDataParallelPlugin(
            reshard_after_forward=bool(self.use_custom_fsdp),  # a distributed optimizer gathers parameters once
            activation_checkpointing=self.recomputes,
            cpu_offload=bool(self.optimizer_cpu_offload),
        )

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the sizes of batches from a loader's batch size and the number of processes with different samples."""
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, dp_degree
        self.global_batch_size = micro_batch_size * dp_degree * _count(self.num_micro_batches)

    def note_batch_sizes(self, batch_sizes: list[int], dp_degree: int) -> None:
        """Set the sizes of batches from those that the prepared loaders return per process."""
        size = (min if self.is_train_batch_min else max)(batch_sizes)
        self.set_training_args(size // _count(self.num_micro_batches), dp_degree)

    def translation(self) -> list[tuple[str, str, str]]:
        """Return the name, the value and the translation of every field that is set."""
        meanings = {**_BECOMES, **{name: f"has no effect: {reason}" for name, reason in _WITHOUT_EFFECT.items()}}
        if self.tp_degree == 1:
            meanings["sequence_parallelism"] = "has no effect: layers are not split (tp_degree is 1)"
        if self.pp_degree == 1:
            meanings["num_layers_per_virtual_pipeline_stage"] = "has no effect: pp_degree is 1"
        rest = "dp_shard_size=-1" if self.shards else "dp_replicate_size=-1"
        rows = [
            (name, str(getattr(self, name)), meaning.format(**vars(self)))
            for name, meaning in meanings.items()
            if self._is_set(name) or name == "gradient_clipping"
        ]
        return [*rows, ("other processes", "-", f"{rest}: see different samples")]

    def log_translation(self) -> None:
        """Log what every field becomes, and warn of those without effect."""
        for name, value, meaning in self.translation():
            level = logging.WARNING if meaning.startswith("has no effect") else logging.INFO
            logger.log(level, "MegatronLMPlugin: %s=%s: %s", name, value, meaning)


def _count(value: int | None) -> int:
    return 1 if value is None else value


_SIZES = ("tp_degree", "pp_degree", "num_micro_batches", "context_parallel_size", "expert_model_parallel_size")
LR_DECAY_STYLES = ("linear", "cosine", "constant")

_DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(MegatronLMPlugin)}
_FILLED: Mapping[str, Any] = {
    "tp_degree": 1,
    "pp_degree": 1,
    "num_micro_batches": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "gradient_clipping": 1.0,
    "sequence_parallelism": False,
    "recompute_activations": False,
    "use_distributed_optimizer": False,
}
"""What a field has if neither code nor environment set it."""

_BECOMES: Mapping[str, str] = {
    "tp_degree": "tp_size={tp_degree}, by the plan that the model carries",
    "pp_degree": "pp_size={pp_degree}: train by accelerator.forward_backward",
    "context_parallel_size": "cp_size={context_parallel_size}: train inside accelerator.maybe_context_parallel",
    "expert_model_parallel_size": "ep_size={expert_model_parallel_size}, by the plan that the model carries",
    "num_micro_batches": "a step takes {num_micro_batches} batches of the loader; a pipeline passes them on one by one",
    "num_layers_per_virtual_pipeline_stage": 'PipelineConfig(schedule="interleaved", layers_per_stage='
    "{num_layers_per_virtual_pipeline_stage})",
    "sequence_parallelism": "TorchTensorParallelConfig(sequence_parallel=True)",
    "use_distributed_optimizer": "dp_shard_size=-1, reshard_after_forward=False: FSDP2 shards parameters too",
    "use_custom_fsdp": "dp_shard_size=-1: FSDP2",
    "recompute_activations": "activation_checkpointing=True: every block is recomputed",
    "recompute_granularity": "activation_checkpointing=True: every block is recomputed",
    "optimizer_cpu_offload": "cpu_offload=True: shards of parameters, gradients and optimizer states are on the host",
    "gradient_clipping": "the largest norm of the gradients in every step; 0 does not clip",
    "lr_decay_style": "read by MegatronLMDummyScheduler",
    "lr_warmup_fraction": "read by MegatronLMDummyScheduler",
    "min_lr": "read by MegatronLMDummyScheduler",
}

_LOOP = "the script's loop decides."
_LENGTH = "sequences are as long as the batches."
_WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("train_iters", "train_samples", "eval_iters", "eval_interval"), _LOOP),
    **dict.fromkeys(("seq_length", "encoder_seq_length", "decoder_seq_length"), _LENGTH),
    **dict.fromkeys(("recompute_method", "recompute_num_layers"), "every block is recomputed by itself."),
    "consumed_samples": "a loader's position is in the checkpoint.",
    "tensorboard_dir": 'log_with="tensorboard" logs.',
    "set_all_logging_options": "log_with logs.",
    "return_logits": "a model returns what it returns.",
    "overlap_cpu_optimizer_d2h_h2d": "FSDP2 decides when it copies.",
}

_OWN_MODEL = ("the model is the script's own, and is not made again.", "Set it in the model's config.")
_OWN_STEP = ("the step is the script's own.", "Write it in the loop, or give forward_backward a loss_fn.")
_OWN_DATA = ("data come from the script's own loaders.", "Give prepare() a DataLoader.")
_GROUPS = ("Megatron-LM's optimizer is not here.", "Give the optimizer parameter groups.")
_SCHEDULE = (
    "the schedule is the script's own.",
    "Give MegatronLMDummyScheduler(total_num_steps=..., warmup_num_steps=...) the numbers.",
)
_REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "use_rotary_position_embeddings"), _OWN_MODEL),
    **dict.fromkeys(("attention_softmax_in_fp32", "custom_model_provider_function"), _OWN_MODEL),
    "custom_prepare_model_function": _OWN_MODEL,
    "attention_backend": (_OWN_MODEL[0], "Choose the attention in the model: attn_implementation of transformers."),
    **dict.fromkeys(("custom_train_step_class", "custom_train_step_kwargs", "custom_loss_function"), _OWN_STEP),
    **dict.fromkeys(("megatron_dataset_flag", "custom_megatron_datasets_provider_function"), _OWN_DATA),
    "custom_get_batch_function": _OWN_DATA,
    "eod_mask_loss": (_OWN_DATA[0], "Give labels of -100 where no loss is to be computed."),
    "calculate_per_token_loss": (_OWN_STEP[0], "Pass the sum of the losses and their number: num_items."),
    **dict.fromkeys(("no_wd_decay_cond", "scale_lr_cond", "lr_mult"), _GROUPS),
    **dict.fromkeys(("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"), _GROUPS),
    "use_precision_aware_optimizer": (_GROUPS[0], "Use an optimizer with small states, such as AdamW8bit."),
    **dict.fromkeys(("lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples"), _SCHEDULE),
    "pipeline_model_parallel_split_rank": (
        "a pipeline is cut at modules.",
        "Use ParallelismConfig(pp_handler=PipelineConfig(split_at=[...])) instead of this plugin.",
    ),
    "decoder_last_pipeline_num_layers": (
        "the stages of this plugin have equally many layers.",
        "Use ParallelismConfig(pp_handler=PipelineConfig(split_at=[...])) instead of this plugin.",
    ),
    "expert_tensor_parallel_size": ("experts are spread whole.", "Use expert_model_parallel_size."),
    "no_load_optim": ("a checkpoint is loaded as a whole.", "Load the weights alone, by load_checkpoint_in_model."),
    "no_save_optim": ("a checkpoint is saved as a whole.", "Save the weights alone, by save_model."),
    "other_megatron_args": ("Megatron-LM's own arguments have no reader here.", "Leave them out."),
}


class MegatronLMDummyDataLoader:
    """Stand for the data loader that Megatron-LM makes: refused, by name."""

    def __init__(self, **dataset_kwargs: Any) -> None:
        raise UnsupportedSettingError(
            "MegatronLMDummyDataLoader(...)",
            "Megatron-LM's data sets are not here.",
            "Give prepare() a DataLoader.",
        )
