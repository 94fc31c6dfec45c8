"""Configuration files: those of accelerate 1.15, JSON, old ones, wrong ones, and where the default one is.

`written_by_1_15/` was written by accelerate 1.15: by its `config` command on a terminal, a few by its ClusterConfig.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.launch import files
from meshwright.config.launch.files import (
    KNOWN_KEYS,
    ConfigFile,
    default_config_path,
    find_config,
    load_mapping,
    read_config,
    write_config,
)

HERE = Path(__file__).parent
WRITTEN_BY_1_15 = sorted((HERE / "written_by_1_15").iterdir())
KEYS_USED = [line.split("\t")[0] for line in (HERE / "yaml_keys_used.tsv").read_text().splitlines()]


def of_1_15(name: str) -> ConfigFile:
    return read_config(HERE / "written_by_1_15" / name)


def written(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", WRITTEN_BY_1_15, ids=lambda path: path.name)
def test_a_file_of_1_15_is_understood_to_the_last_key(path: Path) -> None:
    assert read_config(path).unknown == ()


@pytest.mark.parametrize("key", KEYS_USED)
def test_a_key_that_people_use_is_known(key: str) -> None:
    assert key in KNOWN_KEYS


def test_the_files_of_1_15_have_nearly_all_keys_that_people_use() -> None:
    seen = {key for path in WRITTEN_BY_1_15 for key, _ in files._flat(read_config(path).contents)}
    seen |= {key.split(".")[0] for key in seen}
    assert set(KEYS_USED) <= seen


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no.yaml", {"num_processes": 1, "cpu": False, "gpu_ids": "all", "mixed_precision": "no"}),
        ("no_cpu_only.yaml", {"num_processes": 1, "cpu": True, "mixed_precision": "bf16"}),
        ("basic.json", {"num_processes": 1, "cpu": True, "mixed_precision": "bf16"}),
        ("basic.yaml", {"num_processes": 1, "cpu": True, "mixed_precision": "no"}),
        ("multi_cpu.yaml", {"num_processes": 4, "cpu": True, "mixed_precision": "bf16", "debug": False}),
        ("multi_cpu_debug.yaml", {"num_processes": 2, "debug": True}),
        ("multi_cpu_mpirun.yaml", {"mpirun_hostfile": "/shared/hosts", "num_machines": 2, "num_processes": 8}),
        ("multi_gpu.yaml", {"multi_gpu": True, "gpu_ids": "0,1,2,3", "enable_cpu_affinity": True, "cpu": False}),
        (
            "multi_gpu_two_machines.yaml",
            {"multi_gpu": True, "num_machines": 2, "machine_rank": 1, "main_process_port": 29501}
            | {"main_process_ip": "10.0.0.1", "rdzv_backend": "static", "same_network": True},
        ),
        ("multi_gpu_two_machines_c10d.yaml", {"rdzv_backend": "c10d", "same_network": False, "machine_rank": 0}),
        ("multi_xpu.yaml", {"multi_gpu": True, "num_processes": 2}),
        ("fsdp_1.yaml", {"use_fsdp": True, "fsdp_version": "1", "fsdp_backward_prefetch": "BACKWARD_PRE"}),
        ("fsdp_1_by_size.yaml", {"fsdp_min_num_params": 1_000_000, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
        ("fsdp_1_sharding_strategy.yaml", {"use_fsdp": True, "fsdp_sharding_strategy": "HYBRID_SHARD"}),
        ("fsdp_2.yaml", {"use_fsdp": True, "fsdp_version": "2", "fsdp_activation_checkpointing": "True"}),
        ("parallelism_config.yaml", {"use_parallelism_config": True, "parallelism_config_cp_size": 2}),
        ("deepspeed_zero2.yaml", {"use_deepspeed": True, "zero_stage": 2, "gradient_accumulation_steps": 4}),
        ("deepspeed_zero3.yaml", {"zero_stage": 3, "zero3_init_flag": "True", "offload_param_nvme_path": "/nvme"}),
        ("deepspeed_config_file.yaml", {"use_deepspeed": True, "deepspeed_config_file": "deepspeed.json"}),
        ("deepspeed_two_machines.yaml", {"deepspeed_hostfile": "/shared/hosts", "num_machines": 2}),
        ("megatron_lm.yaml", {"use_megatron_lm": True, "megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2}),
        ("fp8_ao.yaml", {"mixed_precision": "fp8", "fp8_backend": "ao", "fp8_pad_inner_dim": True}),
        ("fp8_te.yaml", {"fp8_amax_history_len": 1024, "fp8_override_linear_precision": [False, False, False]}),
        ("fp8_te_short_names.yaml", {"fp8_amax_history_len": 32, "fp8_override_linear_precision": (False,) * 3}),
        ("fp8_msamp.yaml", {"fp8_backend": "msamp", "fp8_opt_level": "O2"}),
        ("dynamo.yaml", {"dynamo_backend": "inductor", "dynamo_mode": "reduce-overhead", "dynamo_use_fullgraph": True}),
        ("xla.yaml", {"tpu": True, "num_processes": 8, "env": []}),
        ("xla_pod.yaml", {"tpu": True, "vm": ["vm-1", "vm-2"], "env": ["A=1", "B=2"], "tpu_use_cluster": True}),
        ("sagemaker.yaml", {"gpu_ids": "all", "num_machines": 1}),
    ],
)
def test_a_file_of_1_15_says_what_it_was_told(name: str, says: dict[str, Any]) -> None:
    values = of_1_15(name).values
    assert {option: values.get(option) for option in says} == says


def test_data_parallelism_on_cpus_switches_nothing_on() -> None:
    switched_on = {name for name, value in of_1_15("multi_cpu.yaml").values.items() if value is True}
    assert switched_on == {"cpu", "same_network"}


def test_minus_one_process_means_as_many_as_there_are() -> None:
    config = of_1_15("multi_gpu_all.yaml")
    assert config.contents["num_processes"] == -1
    assert "num_processes" not in config.values
    assert config.values["multi_gpu"] is True


def test_a_value_knows_its_file_and_key() -> None:
    config = of_1_15("deepspeed_zero2.yaml")
    assert config.origin_of("num_processes") == f"{config.path}: num_processes"
    assert config.origin_of("zero_stage") == f"{config.path}: deepspeed_config.zero_stage"
    assert config.origin_of("use_deepspeed") == f"{config.path}: distributed_type"
    assert of_1_15("parallelism_config.yaml").keys["use_parallelism_config"] == "parallelism_config"


def test_the_kind_of_place_is_kept() -> None:
    assert of_1_15("sagemaker.yaml").kind == "AMAZON_SAGEMAKER"
    assert of_1_15("multi_cpu.yaml").kind == "LOCAL_MACHINE"
    assert files.engine_of_kind("AMAZON_SAGEMAKER") == "SageMaker"
    assert files.engine_of_kind("LOCAL_MACHINE") is None


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("num_procesess: 2", "nobody reads the key `num_procesess`. Did you mean num_processes?"),
        ("completely_else: 2", "nobody reads the key `completely_else`."),
        (
            "fsdp_config: {fsdp_versoin: 2}",
            "nobody reads the key `fsdp_config.fsdp_versoin`. Did you mean fsdp_config.fsdp_version?",
        ),
        ("deepspeed_config: ds.json", "nobody reads `deepspeed_config: ds.json`: it must hold `key: value` lines"),
    ],
)
def test_a_key_that_nobody_reads_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    config = read_config(written(tmp_path, f"{line}\nnum_machines: 1\n"))
    assert len(config.unknown) == 1
    assert config.unknown[0].startswith(f"{config.path}: {sentence}")
    assert config.values == {"num_machines": 1}


@pytest.mark.parametrize(
    ("text", "misspelt"),
    [
        ("num_procesess: 2", True),
        ("fsdp_config: {fsdp_versoin: 2}", True),
        ("num_procesess: 2\nnum_processes: 2", False),  # the key itself is there
        ("fsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_PRE}", False),  # of an older version
        ("num_procs: 2", False),
        ("completely_else: 2", False),
    ],
)
def test_only_a_slip_of_the_pen_counts_as_misspelt(tmp_path: Path, text: str, misspelt: bool) -> None:
    assert bool(read_config(written(tmp_path, text)).misspelt) == misspelt


def test_no_key_that_libraries_use_counts_as_misspelt() -> None:
    for row in Path(__file__).with_name("yaml_keys_used.tsv").read_text().splitlines():
        key = row.split("\t")[0]
        assert key in files.KNOWN_KEYS or not files._is_misspelt(key, {}), key


def test_an_unquoted_no_is_a_word(tmp_path: Path) -> None:
    text = "mixed_precision: no\ndistributed_type: NO\ndynamo_config:\n  dynamo_backend: NO\ndowncast_bf16: no\n"
    config = read_config(written(tmp_path, text))
    assert config.values == {"mixed_precision": "no", "dynamo_backend": "no", "downcast_bf16": False}
    assert files.distributed_kind(config.contents) == "NO"


def test_empty_values_and_sections_say_nothing(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, "gpu_ids:\nfsdp_config: {}\ndeepspeed_config:\nparallelism_config: {}\n"))
    assert (config.values, config.unknown) == ({}, ())
    assert read_config(written(tmp_path, "", "empty.yaml")).values == {}


def test_the_keys_of_very_old_files(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, "fp16: true\ndynamo_backend: INDUCTOR\n"))
    assert config.values == {"mixed_precision": "fp16", "dynamo_backend": "inductor"}
    assert read_config(written(tmp_path, "fp16: false\n")).values == {"mixed_precision": "no"}
    assert read_config(written(tmp_path, "fp16: true\nmixed_precision: bf16\n")).values == {"mixed_precision": "bf16"}


@pytest.mark.parametrize("kind", ["TPU", "xla", "DistributedType.XLA"])
def test_other_spellings_of_a_distributed_type(tmp_path: Path, kind: str) -> None:
    assert read_config(written(tmp_path, f"distributed_type: {kind}\n")).values == {"tpu": True}


def test_words_where_a_list_is_expected(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, "tpu_env: A=1\n")).values == {"env": ["A=1"]}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("mixed_precision: bf61\n", "mixed_precision: 'bf61' is unknown: choose one of no, fp8, fp16, bf16"),
        ("num_processes: two\n", "num_processes: 'two' is not a valid value"),
        ("num_processes: [2]\n", r"num_processes: \[2\] is not a valid value"),
        ("use_cpu: perhaps\n", "use_cpu: 'perhaps' is not a valid value .*neither yes nor no"),
        ("distributed_type: MULTI_GPPU\n", "'MULTI_GPPU' is unknown. Did you mean MULTI_GPU.* Choose one of NO, MULTI"),
        ("a: b: c\n", "is not valid YAML: "),
        ("- a\n- b\n", "must hold `key: value` lines, not a list"),
        ("!!python/object/apply:os.getcwd []\n", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, error: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=error) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", b"[" * 50_000),
        ("a.yaml", b"a: !!timestamp x"),
        ("a.yaml", b"a: !!int x"),
        ("a.yaml", b"a: !!python/object/apply:os.system [ls]"),
        ("a.yaml", b"a: &a [*a, *a]\nb: *a"),
        ("a.yaml", b"a: \xff"),
        ("a.yaml", b"? [a]\n: b"),
        ("a.json", b"[" * 50_000),
        ("a.json", b'{"a": ' + b"9" * 5000 + b"}"),
        ("a.json", b"\xff"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=rf"The configuration file .*{name}"):
        load_mapping(tmp_path / name)


def test_a_file_that_is_not_there_is_an_error_only_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert find_config(None) is None
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml does not exist\. Write it with `meshwright config"):
        find_config("nowhere.yaml")


def test_json_is_read_and_written(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"num_processes": 3, "use_cpu": True}, indent="\t"), "config.json")
    assert read_config(path).values == {"num_processes": 3, "cpu": True}
    write_config(path, {"num_machines": 1})
    assert json.loads(path.read_text()) == {"num_machines": 1}
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        read_config(written(tmp_path, "num_processes: 3", "config.json"))


def test_json_under_a_yaml_name_is_read(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", {"num_processes": 3}, as_json=True)
    assert path.read_text().startswith("{")
    assert read_config(path).values == {"num_processes": 3}


def test_yaml_is_written_with_sorted_keys_into_a_new_folder(tmp_path: Path) -> None:
    path = write_config(tmp_path / "a" / "b" / "config.yaml", {"use_cpu": True, "mixed_precision": "no"})
    assert path.read_text() == "mixed_precision: 'no'\nuse_cpu: true\n"


def test_the_default_file_is_found_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    end = Path("accelerate", "default_config.yaml")
    assert default_config_path() == tmp_path / "home" / ".cache" / "huggingface" / end
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_config_path() == tmp_path / "cache" / "huggingface" / end
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert default_config_path() == tmp_path / "hf" / end
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert default_config_path() == tmp_path / "home" / "hf" / end


def test_a_default_file_in_json_is_found_unless_there_is_one_in_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    write_config(tmp_path / "accelerate" / "default_config.json", {"num_processes": 2})
    found = find_config(None)
    assert found is not None
    assert (found.path.name, found.values) == ("default_config.json", {"num_processes": 2})
    write_config(tmp_path / "accelerate" / "default_config.yaml", {"num_processes": 3})
    assert default_config_path().name == "default_config.yaml"
