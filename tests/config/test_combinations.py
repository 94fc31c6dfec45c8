"""What goes with what: every pair of the table is refused by name, and the others are not."""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations
from typing import Any

import pytest

from meshwright import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
)
from meshwright.config.combinations import REFUSED, Feature, Refused, refused_pairs, require_combination
from meshwright.config.settings import AXES_OF_MODELS, TrainingSettings
from meshwright.errors import UnsupportedSettingError

PAIRS = [pytest.param(*pair, id=f"{pair[0].name}-{pair[1].name}") for pair in refused_pairs()]


@pytest.mark.parametrize(("feature", "other", "row"), PAIRS)
def test_a_pair_is_refused_as_it_was_written_with_the_reason_and_the_remedy(
    feature: Feature, other: Feature, row: Refused
) -> None:
    with pytest.raises(UnsupportedSettingError) as refusal:
        require_combination({other: "the second", Feature.DP_SHARD: "besides", feature: "the first"})
    first, second = str(refusal.value).split(" cannot be used: ")[0].split(" with ")
    if second == "the second":  # else the pair of one of them and dp_shard_size comes first
        assert first == "the first"
        assert str(refusal.value).endswith(f"{row.reason} {row.remedy}")


SETTINGS: dict[Feature, dict[str, Any]] = {
    Feature.FSDP: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    Feature.FSDP_CPU_OFFLOAD: {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)},
    Feature.IGNORED_MODULES: {"fsdp_plugin": FullyShardedDataParallelPlugin(ignored_modules="head")},
    Feature.CPU_RAM_EFFICIENT: {
        "fsdp_plugin": FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True),
        "dp_shard_size": 2,
    },
    Feature.DEEPSPEED: {"deepspeed_plugins": DeepSpeedPlugin(zero_stage=2)},
    Feature.MEGATRON: {"megatron_lm_plugin": MegatronLMPlugin()},
    **{Feature(f"{axis}_size"): {f"{axis}_size": 2} for axis in AXES_OF_MODELS},
    Feature.SEQUENCE_PARALLEL: {"tp_size": 2, "tp_handler": TorchTensorParallelConfig(sequence_parallel=True)},
    Feature.OFFLOAD: {"offload": "host"},
    Feature.FP16: {"mixed_precision": "fp16"},
    Feature.FP8: {"mixed_precision": "fp8"},
    Feature.COMPILE: {"dynamo_plugin": TorchDynamoPlugin(backend="eager")},
}
"""How a script asks for a feature."""
_OF_MESH = {field.name for field in fields(ParallelismConfig)}


def settings_with(*features: Feature) -> TrainingSettings:
    given: dict[str, Any] = {"mixed_precision": None}
    for feature in features:
        given |= SETTINGS[feature]
    mesh = {name: given.pop(name) for name in tuple(given) if name in _OF_MESH}
    return TrainingSettings.from_arguments(
        gradient_accumulation_steps=1,
        gradient_accumulation_plugin=None,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        **given,
    )


@pytest.mark.parametrize("feature", SETTINGS, ids=lambda feature: feature.name)
def test_a_setting_that_is_given_is_a_feature_in_use(feature: Feature) -> None:
    assert feature in settings_with(feature).features()
    assert feature not in settings_with().features()


@pytest.mark.parametrize(
    ("feature", "other"),
    [pytest.param(*pair.values[:2], id=pair.id) for pair in PAIRS if {*pair.values[:2]} <= {*SETTINGS}],
)
def test_settings_of_a_refused_pair_are_refused(feature: Feature, other: Feature) -> None:
    with pytest.raises(UnsupportedSettingError, match="cannot be used"):
        require_combination(settings_with(feature, other).features())


def test_no_pair_is_in_the_table_twice() -> None:
    pairs = [frozenset((feature, other)) for feature, other, _ in refused_pairs()]
    assert len(pairs) == len(set(pairs))
    assert all(len(pair) == 2 for pair in pairs)


def test_what_is_not_in_the_table_goes_together() -> None:
    refused = {frozenset((feature, other)) for feature, other, _ in refused_pairs()}
    allowed = [pair for pair in combinations(Feature, 2) if frozenset(pair) not in refused]
    assert len(allowed) > 250
    for pair in allowed:
        require_combination({feature: feature.value for feature in pair})


def test_reasons_and_remedies_are_sentences() -> None:
    for row in REFUSED:
        assert row.reason.endswith(".")
        assert row.remedy.endswith(".")
        assert row.remedy[0].isupper()
