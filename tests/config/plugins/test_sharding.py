from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, StateDictType

from meshwright import FullyShardedDataParallelPlugin
from meshwright.errors import UnsupportedSettingError


def test_the_defaults() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert type(plugin.cpu_offload) is OffloadPolicy
    assert plugin.mixed_precision_policy is None
    assert not plugin.activation_checkpointing


@pytest.mark.parametrize(
    ("strategy", "reshards", "copies"),
    [
        ("FULL_SHARD", True, False),
        (2, False, False),
        ("hybrid_shard", True, True),
        ("HYBRID_SHARD_ZERO2", False, True),
    ],
)
def test_what_fsdp1_called_its_strategy_is_translated_in_one_line(
    strategy: Any, reshards: bool, copies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, sharding_strategy=strategy, use_orig_params=True, backward_prefetch="BACKWARD_PRE"
    )
    assert plugin.reshard_after_forward is reshards
    assert plugin.copy_per_host is copies
    assert plugin.fsdp_version == 2
    [said] = [record.getMessage() for record in caplog.records]
    assert "fsdp_version=1 runs on FSDP2" in said
    assert "backward_prefetch, use_orig_params" in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "which is DDP"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "no such form"),
    ],
)
def test_what_has_no_equivalent_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=said):
        FullyShardedDataParallelPlugin(**fields)


@pytest.mark.parametrize("fields", [{"sharding_strategy": "SOME_SHARD"}, {"auto_wrap_policy": "magic_wrap"}])
def test_unknown_words_list_the_known_ones(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose one of"):
        FullyShardedDataParallelPlugin(**fields)


@pytest.mark.parametrize(
    "given",
    [
        "bf16",
        torch.bfloat16,
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32},
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
    ],
)
def test_a_precision_can_be_said_in_several_ways(given: Any) -> None:
    policy = FullyShardedDataParallelPlugin(mixed_precision_policy=given).mixed_precision_policy
    assert policy == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )


def test_the_accelerators_precision_does_not_override_a_policy_unless_asked_to() -> None:
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy="fp16")
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype is torch.float16
    plugin.set_mixed_precision("bf16", override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16


@pytest.mark.parametrize("given", [True, "true", CPUOffloadPolicy()])
def test_offloading_can_be_said_in_several_ways(given: Any) -> None:
    assert FullyShardedDataParallelPlugin(cpu_offload=given).offloads
    assert not FullyShardedDataParallelPlugin(cpu_offload=False).offloads


def test_a_plugin_is_made_from_the_words_of_a_launch(caplog: pytest.LogCaptureFixture) -> None:
    plugin = FullyShardedDataParallelPlugin.from_variables(
        {
            "fsdp_version": "2",
            "sharding_strategy": "FULL_SHARD",
            "reshard_after_forward": "false",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_cls_names_to_wrap": "Block, Other",
            "min_num_params": "100000000",
            "cpu_offload": "true",
            "state_dict_type": "FULL_STATE_DICT",
            "activation_checkpointing": "true",
            "use_orig_params": "true",
        }
    )
    assert plugin.reshard_after_forward is False
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Other"]
    assert plugin.min_num_params is None
    assert plugin.offloads
    assert plugin.activation_checkpointing
    assert not plugin.saves_shards
    assert not caplog.records


def test_the_environment_asks_for_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.config.settings import TrainingSettings

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "100")
    settings = TrainingSettings.from_arguments(
        mixed_precision=None, gradient_accumulation_steps=1, gradient_accumulation_plugin=None
    )
    assert settings.sharding is not None
    assert settings.sharding.min_num_params == 100
