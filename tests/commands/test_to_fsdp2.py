"""`meshwright to-fsdp2`: files for FSDP1 in the terms of FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshwright.commands.cli import main
from meshwright.commands.to_fsdp2 import convert_config_to_fsdp2

OLD = Path(__file__).parents[1] / "config" / "launch" / "written_by_1_15"


def convert(source: Path, target: Path) -> dict[str, object]:
    main(["to-fsdp2", "--config_file", str(source), "--output_file", str(target)])
    contents: dict[str, object] = yaml.safe_load(target.read_text())
    return contents


def test_a_file_of_fsdp1_is_converted_as_1_15_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted = convert(OLD / "fsdp_1.yaml", tmp_path / "new.yaml")
    assert converted.pop("fsdp_config") == {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_version": 2,
    }
    old = yaml.safe_load((OLD / "fsdp_1.yaml").read_text())
    assert converted == {key: value for key, value in old.items() if key != "fsdp_config"}
    said = capsys.readouterr().out
    for key in ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"):
        assert f"{key}: left out" in said


@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False), (2, False)],
)
def test_strategies_become_resharding(strategy: object, reshards: bool) -> None:
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": strategy}}
    assert convert_config_to_fsdp2(config)["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshards,
    }


def test_a_section_alone_is_converted_and_unknown_keys_are_kept() -> None:
    section = {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_sharding_strategy": "FULL_SHARD", "unknown": 5}
    converted = {"fsdp_version": 2, "unknown": 5, "fsdp_reshard_after_forward": True}
    assert convert_config_to_fsdp2({"fsdp_config": section}) == {"fsdp_config": converted}
    for other in ({}, {"fsdp_config": {}}, {"distributed_type": "MULTI_GPU", "fsdp_config": section}):
        assert convert_config_to_fsdp2(other) is other


def test_a_copy_per_machine_is_kept() -> None:
    section = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
    config = {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 8, "fsdp_config": section}
    assert convert_config_to_fsdp2(config)["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }
    with pytest.raises(ValueError, match="cannot be divided"):
        convert_config_to_fsdp2({**config, "num_processes": 7})


@pytest.mark.parametrize(("file", "reason"), [("fsdp_2.yaml", "already"), ("basic.yaml", "does not use FSDP")])
def test_what_needs_no_conversion_is_left(
    file: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["to-fsdp2", "--config_file", str(OLD / file), "--output_file", str(tmp_path / "new.yaml")])
    assert reason in capsys.readouterr().out
    assert not (tmp_path / "new.yaml").exists()


def test_nothing_is_written_over_without_being_asked(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text((OLD / "fsdp_1.yaml").read_text())
    before = mine.read_text()
    with pytest.raises(SystemExit, match="--overwrite"):
        main(["to-fsdp2", "--config_file", str(mine)])
    with pytest.raises(SystemExit, match="exists"):
        main(["to-fsdp2", "--config_file", str(OLD / "fsdp_1.yaml"), "--output_file", str(mine)])
    with pytest.raises(SystemExit, match="no file"):
        main(["to-fsdp2", "--config_file", str(tmp_path / "none.yaml"), "--overwrite"])
    assert mine.read_text() == before
    main(["to-fsdp2", "--config_file", str(mine), "--overwrite"])
    assert yaml.safe_load(mine.read_text())["fsdp_config"]["fsdp_version"] == 2


def test_what_shards_nothing_is_refused() -> None:
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}
    with pytest.raises(ValueError, match="which is DDP"):
        convert_config_to_fsdp2(config)
