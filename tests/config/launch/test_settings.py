"""Flag, environment, file, default: in this order, and every value knows where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.commands.launch import launch_command_parser
from meshwright.config.launch.files import ConfigFile, read_config
from meshwright.config.launch.options import OPTIONS
from meshwright.config.launch.parser import explicit_options
from meshwright.config.launch.settings import LaunchSettings
from meshwright.config.settings import TrainingSettings
from meshwright.errors import UnsupportedSettingError


def config(tmp_path: Path, text: str) -> ConfigFile:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return read_config(path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(tmp_path, "mixed_precision: fp16\nnum_processes: 2\n")
    assert LaunchSettings.resolve({}, None).mixed_precision == "no"
    settings = LaunchSettings.resolve({}, file)
    assert (settings.mixed_precision, settings.num_processes) == ("fp16", 2)
    assert settings.origin("mixed_precision") == f"{file.path}: mixed_precision"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    settings = LaunchSettings.resolve({}, file)
    assert settings.mixed_precision == "bf16"
    assert settings.origin("mixed_precision") == "environment variable ACCELERATE_MIXED_PRECISION"
    settings = LaunchSettings.resolve({"mixed_precision": "no"}, file)
    assert settings.mixed_precision == "no"
    assert settings.origin("mixed_precision") == "flag --mixed_precision"
    assert settings.origin("num_machines") == "default"


@pytest.mark.parametrize(
    ("variable", "word", "complaint"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp17", "choose one of no, fp8"),
        ("MASTER_PORT", "many", "MASTER_PORT='many'"),
        ("ACCELERATE_USE_CPU", "maybe", "ACCELERATE_USE_CPU='maybe'"),
    ],
)
def test_a_bad_variable_is_named(variable: str, word: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, word)
    with pytest.raises(ValueError, match=complaint):
        LaunchSettings.resolve({}, None)


def test_what_was_asked_for_reaches_the_children_by_the_published_names() -> None:
    variables = LaunchSettings.resolve(
        {
            "cpu": True,
            "mixed_precision": "bf16",
            "gradient_accumulation_steps": 4,
            "debug": True,
            "dynamo_backend": "no",
            "data_order": "accelerate-1",
        },
        None,
    ).child_variables()
    assert variables == {
        "ACCELERATE_USE_CPU": "True",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DEBUG_MODE": "True",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "MESHWRIGHT_DATA_ORDER": "accelerate-1",
    }
    assert LaunchSettings.resolve({}, None).child_variables() == {
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_MIXED_PRECISION": "no",
    }


@pytest.mark.parametrize(
    ("flags", "text", "complaint"),
    [
        ({"use_megatron_lm": True, "megatron_lm_attention_backend": "flash"}, "", "attention_backend='flash'"),
        ({}, "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_hidden_dropout: 0.1}", "hidden_dropout"),
        ({}, "compute_environment: AMAZON_SAGEMAKER", "SageMaker"),
        ({"tpu": True}, "", r"TPU \(flag --tpu\) cannot be used: torch_xla is not installed"),
    ],
)
def test_an_engine_that_has_not_landed_is_refused_by_name(
    flags: dict[str, Any], text: str, complaint: str, tmp_path: Path
) -> None:
    file = config(tmp_path, text)
    settings = LaunchSettings.resolve(flags, file)
    with pytest.raises(UnsupportedSettingError, match=complaint):
        settings.refuse_missing_engines(file)


def test_settings_of_megatron_reach_the_processes_and_are_translated() -> None:
    file = read_config(Path(__file__).with_name("written_by_1_15") / "megatron_lm.yaml")
    settings = LaunchSettings.resolve({"megatron_lm_num_micro_batches": 4}, file)
    settings.refuse_missing_engines(file)
    variables = settings.child_variables()
    assert variables["ACCELERATE_USE_MEGATRON_LM"] == "True"
    assert {variables[f"MEGATRON_LM_{name}"] for name in ("TP_DEGREE", "PP_DEGREE")} == {"2"}
    plugin = settings.megatron()
    assert plugin is not None
    assert (plugin.num_micro_batches, plugin.sequence_parallelism, plugin.recomputes, plugin.shards) == (
        4,
        True,
        True,
        True,
    )
    assert LaunchSettings.resolve({}, None).megatron() is None


def test_engines_that_are_here_carry_their_settings_into_the_processes(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    text += "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    file = config(tmp_path, text)
    settings = LaunchSettings.resolve({"fsdp_activation_checkpointing": "true"}, file)
    settings.refuse_missing_engines(file)
    assert settings.without_effect() == []
    variables = settings.child_variables()
    assert {name: variables[name].lower() for name in variables if "FSDP" in name or "PARALLELISM" in name} == {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    }


def test_a_flag_that_nobody_reads_is_told() -> None:
    settings = LaunchSettings.resolve({"fsdp_version": "2", "fp8_backend": "te", "dynamo_mode": "max-autotune"}, None)
    told = "\n".join(settings.without_effect())
    assert "fsdp_version = 2 (flag --fsdp_version) has no effect" in told
    assert "fp8_backend" in told
    assert (
        "dynamo_mode = max-autotune (flag --dynamo_mode) has no effect: it is read with a dynamo_backend only" in told
    )
    read = {"mixed_precision": "fp8", "fp8_backend": "ao", "dynamo_backend": "inductor", "dynamo_mode": "max-autotune"}
    assert LaunchSettings.resolve(read, None).without_effect() == []


@pytest.mark.parametrize(
    ("size", "switch"),
    [
        ("parallelism_config_tp_size", "use_parallelism_config"),
        ("parallelism_config_dp_shard_size", "use_parallelism_config"),
        ("parallelism_config_ep_size", "use_parallelism_config"),
        ("megatron_lm_tp_degree", "use_megatron_lm"),
        ("megatron_lm_context_parallel_size", "use_megatron_lm"),
    ],
)
def test_a_size_that_is_given_is_used(size: str, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_flag = LaunchSettings.resolve({size: 2}, None)
    assert by_flag.resolved[switch].value
    assert by_flag.origin(switch) == f"flag --{size}"
    assert by_flag.child_variables()[f"ACCELERATE_{switch.upper()}"] == "True"
    assert by_flag.without_effect() == []
    assert not LaunchSettings.resolve({size: 1}, None).resolved[switch].value
    monkeypatch.setenv(size.upper(), "2")
    assert LaunchSettings.resolve({}, None).origin(switch) == f"environment variable {size.upper()}"
    monkeypatch.setenv(f"ACCELERATE_{switch.upper()}", "false")
    refused = LaunchSettings.resolve({size: 2}, None)
    assert not refused.resolved[switch].value, "a switch that is given decides"
    assert f"(--{switch})" in refused.without_effect()[0]


def test_a_file_says_itself_whether_megatron_is_used(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_CPU\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n"
    assert not LaunchSettings.resolve({}, config(tmp_path, text)).resolved["use_megatron_lm"].value


def test_an_option_without_the_one_it_needs_is_told() -> None:
    assert (
        "is read with --survive only" in LaunchSettings.resolve({"replace_hung_after": 5.0}, None).without_effect()[0]
    )
    assert LaunchSettings.resolve({"replace_hung_after": 5.0, "survive": True}, None).without_effect() == []
    assert "is read with --ray only" in LaunchSettings.resolve({"ray_address": "auto"}, None).without_effect()[0]


def test_a_process_whose_environment_has_a_size_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def mesh() -> Any:
        return TrainingSettings.from_arguments(
            mixed_precision=None, gradient_accumulation_steps=1, gradient_accumulation_plugin=None
        )

    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "1")
    assert mesh().parallelism is None
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert mesh().parallelism.tp_size == 2
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "false")
    assert mesh().parallelism is None
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")
    assert mesh().megatron.tp_degree == 2


def test_a_child_knows_what_its_launch_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("MESHWRIGHT_LAUNCH_ORIGINS", '{"mixed_precision": "flag --mixed_precision"}')
    settings = TrainingSettings.from_arguments(
        mixed_precision=None, gradient_accumulation_steps=1, gradient_accumulation_plugin=None
    )
    assert settings.origins["mixed_precision"] == "meshwright launch, flag --mixed_precision"


def test_a_launch_can_be_said_again_for_another_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    file = config(tmp_path, "num_processes: 2\n")
    words = [
        "--cpu",
        "--rdzv_conf",
        "timeout=9",
        "--vm",
        "a",
        "--vm",
        "b",
        "--fp8_pad_inner_dim",
        "false",
        "-m",
        "x.py",
    ]
    flags = explicit_options(launch_command_parser().parse_args(words), OPTIONS)
    said = LaunchSettings.resolve(flags, file).to_flags()
    assert said[:2] == ["--config_file", str(file.path)]
    again = launch_command_parser().parse_args([*said, "x.py"])
    assert again.config_file == str(file.path)
    assert explicit_options(again, OPTIONS) == flags, "what the environment and the file say is not repeated"
