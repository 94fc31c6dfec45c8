"""What has to be changed in a script so that it runs as a search proposes."""

from __future__ import annotations

from meshwright.tools.plan.searching.changes import changes_of
from meshwright.tools.plan.searching.choices import Choice

BASE = Choice(dp_shard=4, batch=8)


def test_what_a_launch_can_set_needs_no_change() -> None:
    assert changes_of(Choice(dp_shard=2, tp=2, batch=8, accumulation=2, recompute=True), BASE, ()) == []


def test_a_batch_size_is_a_number_in_the_script_or_an_argument_of_it() -> None:
    half = Choice(dp_shard=4, batch=4, accumulation=2)
    assert changes_of(half, BASE, ()) == ["batch size 4 of each process instead of 8"]
    arguments = ["--eval_batch_size", "8", "--train_batch_size=8", "--layers", "8"]
    assert changes_of(half, BASE, (), arguments)[0].endswith("instead of 8 (--train_batch_size)")
    assert changes_of(half, BASE, (), ["--batch_a", "8", "--batch_b", "8"])[0].endswith("instead of 8")


def test_what_the_code_sets_has_to_be_changed_there() -> None:
    in_code = ("gradient_accumulation_steps", "parallelism_config", "fsdp_plugin")
    choice = Choice(dp_shard=2, tp=2, batch=8, accumulation=2, reshard=False)
    assert changes_of(choice, BASE, in_code) == [
        "gradient_accumulation_steps=2 instead of 1",
        "ParallelismConfig(dp_shard_size=2, tp_size=2), with its other arguments",
        "FullyShardedDataParallelPlugin(reshard_after_forward=False, activation_checkpointing=False)",
    ]


def test_more_micro_batches_than_stages_are_a_change() -> None:
    choice = Choice(pp=4, batch=32, microbatches=4)
    assert changes_of(choice, Choice(pp=4, batch=32, microbatches=4), ()) == []
    more = Choice(pp=4, batch=32, microbatches=16)
    assert changes_of(more, choice, ()) == ["ParallelismConfig(pp_handler=PipelineConfig(microbatches=16))"]
