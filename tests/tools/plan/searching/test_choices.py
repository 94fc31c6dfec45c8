"""Which ways to spread a run a search considers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.tools.plan.searching.choices import Choice, Space, choice_of, first_group
from meshwright.tools.plan.trace import Traits
from tests.tools.plan.made import model

BASE = Choice(dp_replicate=8, batch=4)
ANY = Traits(accumulates=True, splits_sequences=True, forwards_backwards=True, has_tp_plan=True)


def space(traits: Traits = ANY, **facts: object) -> Space:
    values = {"world_size": 8, "ranks_per_node": 8, "base": BASE, "samples": 32, "blocks": 12, "traits": traits}
    return Space(**{**values, **facts})  # type: ignore[arg-type]


def used_axes(choices: list[Choice]) -> set[str]:
    return {axis for choice in choices for axis in choice.axes}


def test_every_mesh_uses_all_processes_and_every_step_has_the_same_samples() -> None:
    found = space().choices()
    assert len(found) == len(set(found)) > 100
    for choice in found:
        assert choice.copies * choice.tp * choice.cp * choice.pp == 8
        assert choice.copies * choice.batch * choice.accumulation == 32


def test_only_axes_that_the_script_can_use_are_offered() -> None:
    data = {"dp_replicate", "dp_shard"}
    assert used_axes(space().choices()) == data | {"tp", "cp", "pp"}
    assert used_axes(space(Traits()).choices()) == data
    assert used_axes(space(Traits(splits_sequences=True)).choices()) == data | {"cp"}
    assert used_axes(space(Traits(), base=replace(BASE, dp_replicate=4, tp=2)).choices()) == data | {"tp"}


def test_layers_are_split_within_a_node_and_by_numbers_that_divide_the_heads() -> None:
    traits = replace(ANY, heads=(32, 4))
    assert {choice.tp for choice in space(traits).choices()} == {1, 2, 4}
    assert {choice.tp for choice in space(traits, ranks_per_node=2).choices()} == {1, 2}


def test_a_pipeline_has_at_most_as_many_stages_as_blocks_and_a_batch_of_equal_parts() -> None:
    found = [choice for choice in space(blocks=4).choices() if choice.pp > 1]
    assert {choice.pp for choice in found} == {2, 4}
    assert all(choice.batch % choice.microbatches == 0 and choice.microbatches >= choice.pp for choice in found)


def test_a_script_that_does_not_accumulate_keeps_its_number_of_passes() -> None:
    found = space(replace(ANY, accumulates=False, forwards_backwards=False)).choices()
    assert {choice.accumulation for choice in found} == {1}
    assert {choice.batch for choice in found if choice.copies == 4} == {8}


def test_what_the_user_gives_is_kept() -> None:
    fixed = {"parallelism_config_tp_size": 2, "fsdp_activation_checkpointing": "true"}
    found = [choice for choice in space(fixed=fixed).choices() if not choice.is_replicated]
    assert found
    assert {choice.tp for choice in found} == {2}
    assert {choice.recompute for choice in found} == {True}


def test_replicas_have_no_settings_of_shards_and_are_left_out_where_fsdp_is_asked_for() -> None:
    replicated = [choice for choice in space().choices() if choice.is_replicated]
    assert replicated
    assert {(choice.reshard, choice.recompute) for choice in replicated} == {(True, False)}
    assert not [choice for choice in space(sharded=True).choices() if choice.is_replicated]


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        (BASE, {"gradient_accumulation_steps": 1}),
        (
            Choice(dp_shard=4, tp=2, batch=2, accumulation=4, reshard=False, recompute=True),
            {
                "gradient_accumulation_steps": 4,
                "use_parallelism_config": True,
                "parallelism_config_dp_shard_size": 4,
                "parallelism_config_tp_size": 2,
                "use_fsdp": True,
                "fsdp_version": "2",
                "fsdp_reshard_after_forward": "false",
                "fsdp_activation_checkpointing": "true",
            },
        ),
    ],
)
def test_a_choice_becomes_options_of_a_launch(choice: Choice, options: dict[str, object]) -> None:
    assert choice.options() == options


def test_sizes_that_a_launch_has_already_are_all_said() -> None:
    options = BASE.options(as_mesh=True)
    assert options["parallelism_config_dp_replicate_size"] == 8
    assert options["parallelism_config_tp_size"] == 1
    assert "use_fsdp" not in options


def test_a_trace_says_how_it_is_spread() -> None:
    trace = model(2, sharded=True, all_passes=4, traits=Traits(recomputes=True))
    assert choice_of(trace) == Choice(dp_shard=4, batch=8, accumulation=4, recompute=True)
    assert choice_of(model(2)) == Choice(dp_replicate=4, batch=8)


def test_the_groups_of_an_axis_are_as_far_apart_as_the_axes_inside_of_it() -> None:
    choice = Choice(pp=2, dp_shard=2, tp=2, batch=1)
    assert first_group(choice, "tp") == (0, 1)
    assert first_group(choice, "dp_shard", "cp") == (0, 2)
    assert first_group(choice, "pp") == (0, 4)
