"""Levers: the saving, the setting, and when they do not apply."""

from __future__ import annotations

import pytest

from meshwright.config.launch.options import BY_NAME
from meshwright.tools.plan.memory.depth import extrapolated
from meshwright.tools.plan.memory.levers import MemoryOption, extrapolated_peaks, lever_peaks, levers_of
from meshwright.tools.plan.memory.peak import memory_of
from meshwright.tools.plan.trace import Trace
from tests.tools.plan.made import MIB, model


def levers(trace: Trace) -> dict[str, MemoryOption]:
    return {lever.name: lever for lever in levers_of(trace, memory_of(trace), lever_peaks(trace))}


def test_a_large_head_makes_the_micro_batch_matter() -> None:
    trace = model(4, head=64 * MIB)
    assert memory_of(trace).total == (28 * 4 + 64) * MIB
    lever = levers(trace)["half the micro-batch"]
    # The head is halved, and the activations of blocks. The peak is then the last bucket of the backward pass.
    assert lever.saves == (28 * 4 + 64 - (24 * 4 + 8 + 32)) * MIB
    assert lever.setting == "half the batch size in the script, --gradient_accumulation_steps 2"


def test_recomputed_blocks_keep_their_outputs_only() -> None:
    trace = model(8, head=64 * MIB, sharded=True)
    assert memory_of(trace).total == (28 * 8 + 64) * MIB
    lever = levers(trace)["recompute blocks"]
    assert lever.setting == "--fsdp_activation_checkpointing true"
    # At the head: weights, moments, the outputs of blocks.
    assert lever.saves == 3 * 8 * MIB


def test_replicas_can_be_sharded() -> None:
    trace = model(4)
    lever = levers(trace)["shard over more processes"]
    assert lever.setting == "--use_fsdp --fsdp_version 2"
    # The peak was 32 MiB per block and a bucket. The state is a quarter of it, two blocks of weights are gathered, and
    # the end of the forward pass has 4 MiB of activations per block and a head.
    after = 4 * (2 + 4) + 2 * 8 + 4 * 4 + 4
    assert lever.saves == (32 * 4 + 8 - after) * MIB


def test_a_sharded_model_without_replicas_has_nothing_more_to_shard() -> None:
    found = levers(model(4, sharded=True))
    assert "shard over more processes" not in found
    assert "gradients in the buckets" not in found
    assert "state on the host" in found


def test_the_buckets_of_ddp_can_be_the_gradients() -> None:
    assert levers(model(4))["gradients in the buckets"].saves == 4 * MIB  # then all gradients, and a block


def test_split_layers_leave_sharded_state_as_it_is() -> None:
    """The devices stay as many: of eight that share the state, half share it with twice as many layers."""
    replicas, shards = (model(4, head=64 * MIB, sharded=sharded) for sharded in (False, True))
    setting = "--use_parallelism_config --parallelism_config_tp_size 2 --parallelism_config_{} 2"
    assert levers(replicas)["split layers in two"].setting == setting.format("dp_replicate_size")
    assert levers(shards)["split layers in two"].setting == setting.format("dp_shard_size")
    # Replicas: weights and moments of four blocks, and what blocks keep inside. Shards: only the latter.
    assert levers(replicas)["split layers in two"].saves == 4 * (24 + 3) / 2 * MIB
    assert levers(shards)["split layers in two"].saves == 4 * 3 / 2 * MIB
    assert "two stages for one" not in levers(shards)


def test_every_flag_exists() -> None:
    found = {**levers(model(4, head=64 * MIB)), **levers(model(4, head=64 * MIB, sharded=True))}
    flags = [word for lever in found.values() for word in lever.setting.split() if word.startswith("--")]
    assert len(flags) > 8
    known = {flag for option in BY_NAME.values() for flag in option.flags}
    assert set(flags) <= known


def test_levers_are_sorted_and_those_that_save_nothing_are_left_out() -> None:
    trace = model(4, head=64 * MIB)
    found = levers_of(trace, memory_of(trace), lever_peaks(trace))
    assert [lever.saves for lever in found] == sorted((lever.saves for lever in found), reverse=True)
    assert all(lever.saves > 0 for lever in found)


def test_16_bits_are_offered_to_those_who_compute_in_32() -> None:
    trace = model(4, head=64 * MIB)
    assert "16-bit computation" not in levers(trace)
    for operation in trace.operations:
        operation.dtype = "float32"
    assert levers(trace)["16-bit computation"].saves > 0


@pytest.mark.parametrize("sharded", [False, True])
def test_savings_of_a_deep_model_from_shallow_ones(sharded: bool) -> None:
    def trace(blocks: int) -> Trace:
        return model(blocks, head=64 * MIB, sharded=sharded)

    few, more = trace(4), trace(6)
    memory = extrapolated(memory_of(few), memory_of(more), 20)
    line = levers_of(more, memory, extrapolated_peaks(lever_peaks(few), lever_peaks(more), 8))
    deep = levers(trace(20))
    assert len(deep) > 1
    for lever in line:
        if lever.name != "growing segments":
            assert lever.saves == pytest.approx(deep[lever.name].saves, rel=0.02, abs=MIB)
