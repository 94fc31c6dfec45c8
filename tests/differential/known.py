"""The differences that are there on purpose; each names the row of docs/differences.md that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Known:
    """Observations of scripts that differ, by pattern, and the first cell of the row that says why."""

    scripts: str
    observations: str
    row: str
    worlds: tuple[str, ...] = ("one", "two", "cli")

    def concerns(self, script: str, world: str) -> bool:
        """Tell whether a script must show this difference in a world."""
        return world in self.worlds and any(fnmatchcase(script, pattern) for pattern in self.scripts.split(" | "))

    def explains(self, observation: str) -> bool:
        """Tell whether this is the reason why an observation differs."""
        return any(fnmatchcase(observation, pattern) for pattern in self.observations.split(" | "))


ON_TWO = ("two",)

KNOWN = (
    # data
    Known("shuffled", "order", "shuffled order on N processes", ON_TWO),
    Known(
        "batches_split_and_left_uneven",
        "length of 9",
        "`len()` of a shard with `split_batches=True, even_batches=False`",
        ON_TWO,
    ),
    Known(
        "stream_dispatched | stream_by_default | map_style_data_dispatched | first_batches_of_a_stream_skipped",
        "batches",
        "the last round of a dispatched loader",
        ON_TWO,
    ),
    Known("stream_dispatched", "total", "`total_batch_size` of a dispatched loader"),
    Known("more_batches_skipped_than_there_are", "length", "`len()` after skipping more batches than there are"),
    Known(
        "metrics_of_streams", "sharded 11 | sharded 17", "`gather_for_metrics` at the end of a sharded stream", ON_TWO
    ),
    Known(
        "metrics_of_repeated_means",
        "beams",
        "`gather_for_metrics` of several rows per sample (beams) in an incomplete last round",
    ),
    Known(
        "metrics_in_mappings_with_text",
        "mapping",
        "`gather_for_metrics` of a mapping that holds not only tensors",
        ON_TWO,
    ),
    Known(
        "random_augmentation_beside_a_random_step",
        "augmented | drawn",
        "a loader that is prepared: when its batches are read",
    ),
    Known(
        "batch_sampler_in_the_samplers_place",
        "prepare",
        "a loader with a batch sampler as its `sampler` and `batch_size=None`, on one process",
        ("one",),
    ),
    # processes
    Known("loader_attributes | who_am_i", "device", "`accelerator.device` of several processes on CPUs", ON_TWO),
    Known(
        "partial_state_by_the_environment",
        "processes",
        "`torchrun` on a machine without accelerators, without `cpu=True`",
        ON_TWO,
    ),
    Known("reduce_everything", "none", '`reduce(..., reduction="none")`', ON_TWO),
    Known("reduce_with_a_scale", "scaled", "`reduce(..., scale=s)` outside XLA", ON_TWO),
    Known("mean_of_integers", "mean", '`reduce("mean")` of integers', ON_TWO),
    Known("split_between_processes", "* padded", "`split_between_processes(..., apply_padding=True)`", ON_TWO),
    Known("second_accelerator", "another precision", "a second `Accelerator` with another `mixed_precision`"),
    Known("second_accelerator", "steps", "a second `Accelerator`: `gradient_accumulation_steps`"),
    Known("second_accelerator_that_compiles", "another", "a second `Accelerator` with another `dynamo_backend`"),
    Known("wrong_arguments", "handler", "a handler that is none in `kwargs_handlers`"),
    Known("log_before_any_state", "info", "`get_logger(...).info` before any state exists"),
    Known("tracker_of_ones_own", "trackers", "`trackers` and `get_tracker` on other ranks", ON_TWO),
    Known("tracker_of_another_rank", "unknown name", "`trackers` and `get_tracker` on other ranks", ON_TWO),
    # training
    Known("training_in_fp16", "scaler | loss | weights", '`mixed_precision="fp16"` on a CPU'),
    Known("clipping_a_part_of_the_sum", "gradient", "`clip_grad_norm_` on an accumulating micro-batch"),
    Known(
        "schedule_with_a_length*",
        "rate | state",
        "`OneCycleLR` (any schedule with `total_steps`) on N processes",
        ON_TWO,
    ),
    Known("join_uneven_inputs", "size | weights", "`join_uneven_inputs` on CPUs", ON_TWO),
    # checkpoints
    Known(
        "state_saved_and_loaded | state_saved_without_safetensors | hooks_around_saving | two_of_each_saved",
        "file commit.json | file progress.bin",
        "files of a checkpoint",
    ),
    Known("automatic_names_and_a_limit", "returned", "what `save_state()` returns"),
    Known("a_name_that_is_taken", "save", "a checkpoint folder that exists, with automatic naming"),
    Known("load_of_what_is_not_there", "load", "`load_state` of a folder that is not there"),
    Known("load_of_what_is_not_there", "no name", "`save_state()` without a folder or automatic naming"),
    # inference
    Known("device_maps", "0:1500-* | 0:2000-* | cpu:1500-* | 0:700-*", "`infer_auto_device_map` within tight budgets"),
    Known("checkpoint_loaded_and_dispatched", "nothing there", "`load_checkpoint_and_dispatch` of what is not there"),
    Known("checkpoint_that_does_not_fit", "shape", "`load_checkpoint_in_model` with a weight of another shape"),
    # utilities
    Known("nested_batches", "no size", "`find_batch_size` of a batch without tensors"),
    Known("plugin_defaults", "group", "`InitProcessGroupKwargs().timeout`"),
    Known(
        "plugin_defaults",
        "DataLoaderConfiguration.constant_memory_shuffle | DataLoaderConfiguration.order",
        "names that are only here",
    ),
    Known("choices", "LoggerType.JSONL", "names that are only here"),
    # the command line
    Known("launched_script_that_fails", "code", "exit code of `accelerate launch` when the script fails"),
    Known(
        "launch_without_a_script | launch_with_a_config_file", "missing", "exit codes of a command that was misspelt"
    ),
    Known("wrong_commands", "none", "exit codes of a command that was misspelt"),
    Known("estimate_without_a_hub", "no_model", "exit codes of a command that was misspelt"),
    Known("launch_with_an_unknown_key", "code", "an unknown key in a file"),
    Known("launch_of_two_processes", "lines", "`accelerate launch --cpu --num_processes 4`"),
    Known("config_default", "json", "`accelerate config default` into `.yaml`"),
    Known("env_printed", "version", "`accelerate env`"),
)
