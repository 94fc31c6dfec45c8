from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from meshwright import Accelerator, ParallelismConfig, PartialState
from meshwright.config.plugins.parallelism import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from tests.ranks import ranks


def test_the_published_names_of_axes_and_sizes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=2)
    assert config.total_size == 16
    assert config.data_parallel_size == 4
    assert config.non_data_parallel_size == 4
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["cp", "tp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    assert config.cp_handler == TorchContextParallelConfig(cp_comm_strategy="allgather")


def test_without_sizes_there_is_one_process() -> None:
    config = ParallelismConfig()
    assert config.total_size == 1
    assert config.active_mesh_dims == []
    assert not any((config.tp_enabled, config.cp_enabled, config.dp_shard_enabled, config.pp_enabled))


@pytest.mark.parametrize("size", [0, -2, 1.5])
def test_a_size_is_a_positive_whole_number(size: Any) -> None:
    with pytest.raises(ValueError, match="tp_size"):
        ParallelismConfig(tp_size=size)


def test_what_is_left_can_be_left_to_the_data() -> None:
    assert ParallelismConfig(dp_shard_size=-1, tp_size=2).fitted(8).dp_shard_size == 4
    assert ParallelismConfig(dp_replicate_size=-1, dp_shard_size=2).fitted(8).dp_replicate_size == 4
    with pytest.raises(ValueError, match="only one of"):
        ParallelismConfig(dp_replicate_size=-1, dp_shard_size=-1)


def test_sizes_that_do_not_fit_are_named_with_those_that_would() -> None:
    with pytest.raises(ValueError, match="the run has 8") as raised:
        ParallelismConfig(dp_shard_size=3, tp_size=2).fitted(8)
    said = str(raised.value)
    assert "dp_shard_size=3 x tp_size=2 = 6 processes, and the run has 8" in said
    assert "dp_replicate_size=1, dp_shard_size=4; dp_replicate_size=2, dp_shard_size=2" in said
    assert said.endswith("Or start 6 processes: --num_processes 6.")
    with pytest.raises(ValueError, match="make 3, which must be one of 1, 2, 4, 8"):
        ParallelismConfig(tp_size=3).fitted(8)
    with pytest.raises(ValueError, match="make 3"):
        ParallelismConfig(dp_shard_size=-1, tp_size=3).fitted(8)


def test_a_mesh_of_four_is_refused_on_one_process() -> None:
    with pytest.raises(ValueError, match="the run has 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=4))


def test_sequences_are_divided_over_one_axis() -> None:
    with pytest.raises(ValueError, match="cp_size=2 with sp_size=2 cannot be used: sequences are divided"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2, sp_size=2))
    with pytest.raises(ValueError, match="pp_size=2 with sp_size=2 cannot be used"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, sp_size=2))


def test_unknown_engines_and_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="choose torch"):
        ParallelismConfig(cp_backend="magic")
    with pytest.raises(ValueError, match="allgather or alltoall"):
        TorchContextParallelConfig(cp_comm_strategy="magic")


def test_the_sizes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.config.settings import TrainingSettings

    def resolved(**arguments: Any) -> Any:
        return TrainingSettings.from_arguments(
            mixed_precision=None, gradient_accumulation_steps=1, gradient_accumulation_plugin=None, **arguments
        ).parallelism

    assert resolved() is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    found = resolved()
    assert (found.tp_size, found.dp_shard_size, found.cp_size) == (4, 2, 1)
    assert resolved(parallelism_config=ParallelismConfig(tp_size=2)).tp_size == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert resolved().cp_handler is None
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert resolved().cp_handler.cp_comm_strategy == "alltoall"
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "carrier pigeons")
    with pytest.raises(ValueError, match="cp_comm_strategy='carrier pigeons' is unknown"):
        resolved()
    monkeypatch.delenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "many")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_TP_SIZE='many'"):
        resolved()


def test_it_can_be_written_down() -> None:
    written = ParallelismConfig(tp_size=2).to_json()
    assert written["tp_size"] == 2
    assert "device_mesh" not in written


def test_importing_it_does_not_import_torch() -> None:
    program = "import sys, meshwright.config.plugins.sharding; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_a_config_takes_from_the_environment_what_the_code_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig(dp_shard_size=8)
    assert (config.dp_replicate_size, config.dp_shard_size, config.cp_size, config.tp_size) == (2, 8, 2, 1)
    assert config.cp_handler == TorchContextParallelConfig("alltoall") == TorchContextParallelConfig()
    assert TorchContextParallelConfig("allgather").cp_comm_strategy == "allgather"


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({"dp_replicate_size": 8}, {"dp_replicate": 8}),
        ({"dp_shard_size": 8}, {"dp_shard": 8}),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_shard_size": 4, "cp_size": 2}, {"dp_shard": 4, "cp": 2}),
        ({"cp_size": 8}, {"cp": 8}),
        ({}, {}),
    ],
)
def test_a_mesh_has_the_axes_with_more_than_one_process(sizes: dict[str, int], mesh: dict[str, int]) -> None:
    assert ParallelismConfig(**sizes)._get_mesh() == ((tuple(mesh), tuple(mesh.values())) if mesh else ())


@ranks(2)
def test_a_mesh_of_copies_has_one_axis() -> None:
    config = ParallelismConfig(dp_replicate_size=2)
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="you need to pass a device_type"):
        config.get_device_mesh()
    mesh = config.get_device_mesh("cpu")
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("dp_replicate",), (2,))
    assert mesh["dp"].size() == mesh["dp_cp"].size() == 2
    assert config.get_device_mesh() is mesh


def test_sequence_parallelism_of_deepspeed_is_described_as_in_1_15(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(sp_size=2, dp_shard_size=2, tp_size=2)
    assert config._get_mesh() == (("dp_shard", "sp", "tp"), (2, 2, 2))
    assert config.sp_handler == DeepSpeedSequenceParallelConfig()
    assert DeepSpeedSequenceParallelConfig().sp_seq_length_is_variable is True
    with pytest.raises(ValueError, match="sp_seq_length must be provided"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "128")
    assert DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False).sp_seq_length == 128
    with pytest.raises(ValueError, match=r"Invalid sp_attn_implementation: eager\. .*sdpa"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")
    with pytest.raises(ValueError, match="Invalid sp_attn_implementation: sdap"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdap")
    DeepSpeedSequenceParallelConfig(sp_attn_implementation="kernels-community/flash-attn2")
