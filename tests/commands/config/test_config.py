"""`meshwright config`, as people and containers run it: on a terminal, without one, by flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
import yaml
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from meshwright.commands.config import cluster, get_config_parser, load_config_from_file, main as verb_main
from meshwright.commands.config.config import main as config_main
from meshwright.commands.config.default import write_basic_config
from meshwright.commands.config.update import update_config
from meshwright.config.enums import DistributedType
from meshwright.config.launch.cluster_config import ClusterConfig, SageMakerConfig
from meshwright.config.launch.files import read_config
from meshwright.launch import config_files
from meshwright.runtime.devices import device as devices
from tests.timing import limit

COMMAND = Path(sys.executable).with_name("meshwright")
REFERENCE = os.environ.get("MESHWRIGHT_REFERENCE_PYTHON")
WRITTEN_BY_1_15 = sorted((Path(__file__).parents[2] / "config" / "launch" / "written_by_1_15").iterdir())
DOWN, INTERRUPT, END = "\x1b[B", "\x03", "\x04"

# What `meshwright config default` of 1.15 says on a machine without accelerators.
BASIC = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": False,
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": False,
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": True,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the default file out of the home directory; no machine of a test has accelerators."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(config_files, "count_accelerators", lambda: 0)
    monkeypatch.setattr(cluster, "count_accelerators", lambda: 0)
    return tmp_path


@pytest.fixture
def file(home: Path) -> Path:
    return home / "accelerate" / "default_config.yaml"


def accelerators(monkeypatch: pytest.MonkeyPatch, number: int, kind: str = "cuda") -> None:
    for module in (config_files, cluster):
        monkeypatch.setattr(module, "count_accelerators", lambda: number)
    monkeypatch.setattr(devices, "default_device", lambda: torch.device(kind))
    monkeypatch.setattr(devices, "supports_low_precision", lambda device, dtype: True)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), "config", *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def say(words: str) -> subprocess.CompletedProcess[str]:
    return run(*words.split())


def said(path: Path) -> dict[str, Any]:
    contents: dict[str, Any] = yaml.safe_load(path.read_text())
    return contents


# Without questions


def test_default_writes_what_this_machine_has(file: Path, tmp_path: Path) -> None:
    for name in ("torch", "numpy", "safetensors", "questionary", "prompt_toolkit"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    ran = run("default", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"Wrote {file}. Launch by it: meshwright launch train.py\n"
    assert said(file) == BASIC
    assert list(said(file)) == sorted(BASIC)


def test_default_leaves_a_file_that_is_there(file: Path) -> None:
    assert run("default").returncode == 0
    again = run("default", "--mixed_precision", "bf16")
    assert (again.returncode, said(file)["mixed_precision"]) == (0, "no"), "as published, no failure"
    assert f"{file} is there already and was left as it is" in again.stdout
    with_flags = run("default", "--num_processes", "2")
    assert (with_flags.returncode, said(file)["num_processes"]) == (1, 1), "it was asked for, and not done"
    replaced = run("default", "--num_processes", "2", "--overwrite")
    assert (replaced.returncode, said(file)["num_processes"]) == (0, 2)


@pytest.mark.parametrize("words", [("default",), ()])
def test_flags_write_any_file(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "new folder" / "two.yaml"
    flags = [
        "--num-processes",
        "4",
        "--num_machines",
        "2",
        "--main-process-ip",
        "10.0.0.1",
        "--main_process_port=29501",
    ]
    flags += ["--machine_rank", "1", "--mixed-precision", "bf16", "--debug", "--max_restarts", "2"]
    ran = run(*words, "--config-file", str(path), *flags)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().endswith(f"meshwright launch --config_file '{path}' train.py")
    told = {
        "num_processes": 4,
        "num_machines": 2,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29501,
        "machine_rank": 1,
        "mixed_precision": "bf16",
        "debug": True,
        "max_restarts": 2,
    }
    assert said(path) == {**BASIC, "distributed_type": "MULTI_CPU", **told}


def test_flags_of_engines_write_their_sections_and_say_what_this_version_does(file: Path) -> None:
    sharded = say("default --use_fsdp --fsdp-version 2 --fsdp_offload_params true --num_processes 8")
    assert sharded.returncode == 0
    assert "will not launch" not in sharded.stderr
    assert said(file)["distributed_type"] == "FSDP"
    assert said(file)["fsdp_config"] == {"fsdp_version": 2, "fsdp_offload_params": True}
    assert said(file)["use_cpu"] is False
    unread = say("default --overwrite --zero_stage 3 --dynamo_backend inductor")
    assert "zero_stage = 3 (flag --zero_stage) has no effect: it is read by DeepSpeed only" in unread.stderr
    assert said(file)["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    pod = say("default --overwrite --tpu --vm a --vm b --fp8_override_linear_precision true,false,false")
    assert pod.returncode == 0, pod.stderr
    assert (said(file)["distributed_type"], said(file)["tpu_vm"]) == ("XLA", ["a", "b"])
    assert said(file)["fp8_config"] == {"override_linear_precision": [True, False, False]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("default --num_processes 3 --num_machines 2", "--num_processes is 3, but it counts the processes of all 2"),
        ("default --num_machines 0", "--num_machines is 0: it must be 1 or more"),
        ("default --num_processes 0", "--num_processes is 0: it must be 1 or more"),
        ("--num_proceses 2", "--num_proceses is unknown. Did you mean --num_processes?"),
        ("defalt", "defalt is unknown. Did you mean default?"),
        ("default --num_machines 2 --machine_rank 2", "--machine_rank is 2, but there are 2 machine(s): use 0 to 1"),
        ("default --cpu --multi_gpu", "--cpu and --multi_gpu contradict each other"),
        ("default --mixed_precision bf61", "invalid choice: 'bf61'"),
        ("default --nun_processes 2", "--nun_processes is unknown. Did you mean --num_processes?"),
        ("--num_processes 2 default", "write the flags after `default`: meshwright config default"),
        ("--config_file x.yaml update", "write the flags after `update`"),
        ("update --config_file nowhere.yaml", "nowhere.yaml does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(file: Path, words: str, sentence: str) -> None:
    ran = say(words)
    assert ran.returncode == 2
    assert sentence in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not file.exists()


def test_without_a_terminal_nothing_is_asked(file: Path) -> None:
    ran = run()
    assert ran.returncode == 2
    assert "there is no terminal to ask questions on" in ran.stderr
    assert "meshwright config default --cpu --num_processes 2" in ran.stderr
    assert not file.exists()


def test_help_is_short_and_shows_the_subcommands() -> None:
    helped = run("--help")
    assert helped.returncode == 0
    assert {"default", "update", "--num_processes"} <= set(helped.stdout.split())
    assert "megatron" not in helped.stdout
    assert "--overwrite" in run("default", "--help").stdout
    assert run("update", "--help").stdout.startswith("usage: meshwright config update [-h] [--config_file FILE]")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, {"distributed_type": "MULTI_XPU", "num_processes": 4, "use_cpu": False}),
        ({"num_processes": 1}, {"distributed_type": "NO", "num_processes": 1, "use_cpu": False}),
        ({"cpu": True}, {"distributed_type": "NO", "num_processes": 1, "use_cpu": True}),
        ({"cpu": True, "num_processes": 2}, {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}),
        ({"gpu_ids": "0,2"}, {"distributed_type": "MULTI_XPU", "num_processes": 2, "gpu_ids": "0,2"}),
        ({"num_machines": 2}, {"distributed_type": "MULTI_XPU", "num_processes": 8}),
    ],
)
def test_accelerators_that_are_here(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], told: dict[str, Any]
) -> None:
    accelerators(monkeypatch, 4, "xpu")
    contents = config_files.config_from_options(flags).to_dict()
    assert {key: contents[key] for key in told} == told


@pytest.mark.parametrize("flags", [{"multi_gpu": True}, {"gpu_ids": "all"}])
def test_a_file_for_a_machine_with_accelerators_can_be_written_on_one_without(flags: dict[str, Any]) -> None:
    contents = config_files.config_from_options(flags).to_dict()
    assert (contents["distributed_type"], contents["num_processes"], contents["use_cpu"]) == ("MULTI_GPU", -1, False)


def test_write_basic_config_in_python(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_basic_config(save_location=file) == file
    assert said(file) == BASIC
    assert capsys.readouterr().out == ""
    assert write_basic_config("bf16", str(file)) is False
    assert "left as it is" in capsys.readouterr().out
    other = file.with_name("other.json")
    assert write_basic_config("BF16", other) == other
    assert json.loads(other.read_text()) == {**BASIC, "mixed_precision": "bf16"}
    with pytest.raises(ValueError, match="mixed_precision='bf61' is unknown: choose one of no, fp8, fp16, bf16"):
        write_basic_config("bf61", file.with_name("third.yaml"))


# Updating an old file


def test_update_fills_in_and_drops_nothing_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("# mine\ndistributed_type: MULTI_CPU\nfp16: true\nnum_procesess: 4\nec2_instance_type: ml.p3\n")
    ran = run("update", "--config_file", str(path))
    assert (ran.returncode, ran.stdout) == (0, f"{path} is up to date.\n")
    assert "nobody reads the key `num_procesess`. Did you mean num_processes?" in ran.stderr
    assert "left out `num_procesess: 4`" in ran.stderr
    assert "`ec2_instance_type` means nothing where compute_environment is LOCAL_MACHINE" in ran.stderr
    assert f"the comments in {path} were not kept" in ran.stderr
    expected = {"distributed_type": "MULTI_CPU", "mixed_precision": "fp16", "num_processes": -1, "use_cpu": False}
    assert said(path) == {**BASIC, **expected}


def test_update_of_the_default_file_leaves_one_alone_that_says_everything(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("# mine\n" + yaml.safe_dump(BASIC, sort_keys=False))
    before = file.read_text()
    assert update_config(Namespace(config_file=None)) == str(file)
    assert file.read_text() == before


@pytest.mark.parametrize("path", WRITTEN_BY_1_15, ids=lambda path: path.name)
def test_update_keeps_what_files_of_1_15_say(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    update_config(Namespace(config_file=str(copy)))
    assert capsys.readouterr().err == ""
    assert said(copy) == said(path), "1.15 wrote every key that has a default"


# The published names


def test_the_published_names_are_where_libraries_look_for_them() -> None:
    code = """
import sys
from accelerate.commands.config import (config_args, config_command_parser, default_command_parser,
    default_config_file, get_config_parser, load_config_from_file, main, update_command_parser)
from accelerate.commands.config.cluster import get_cluster_input
from accelerate.commands.config.config import config_command, config_command_parser, get_user_input, main
from accelerate.commands.config.config_args import (BaseConfig, ClusterConfig, SageMakerConfig, cache_dir,
    default_json_config_file, default_yaml_config_file, hf_cache_home)
from accelerate.commands.config.default import default_command_parser, default_config_command, write_basic_config
from accelerate.commands.config.update import update_command_parser, update_config, update_config_command
assert not {"torch", "yaml", "questionary"} & set(sys.modules)
print(hf_cache_home, cache_dir, default_config_file, default_yaml_config_file, default_json_config_file)
"""
    environment = {**os.environ, "HF_HOME": "/hf"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    default = "/hf/accelerate/default_config.yaml"
    assert ran.stdout.split() == ["/hf", "/hf/accelerate", default, default, default]


def test_the_parser_stands_alone() -> None:
    parser = get_config_parser()
    assert parser.parse_args([]).config_file is None
    assert parser.parse_args(["--config_file", "a.yaml"]).config_file == "a.yaml"
    assert parser.parse_args(["default", "--config-file", "a.yaml"]).save_location == "a.yaml"
    assert parser.parse_args(["default", "--mixed_precision", "fp16"]).mixed_precision == "fp16"
    assert parser.parse_args(["update", "--config_file", "a.yaml"]).config_file == "a.yaml"


@pytest.mark.parametrize("main", [verb_main, config_main])
def test_the_verb_runs_alone(file: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[[], None]) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate-config", "--num_processes", "2"])
    main()
    assert said(file)["num_processes"] == 2


@pytest.mark.parametrize("path", WRITTEN_BY_1_15, ids=lambda path: path.name)
def test_a_file_of_1_15_loads_and_writes_the_same_again(tmp_path: Path, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config_from_file(str(path))
    assert isinstance(config, SageMakerConfig if path.stem == "sagemaker" else ClusterConfig)
    assert config.to_dict() == said(path)
    config.to_yaml_file(tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == yaml.safe_dump(said(path))
    config.to_json_file(tmp_path / "again")
    assert json.loads((tmp_path / "again").read_text()) == said(path)
    assert type(config).from_yaml_file(str(tmp_path / "again.yaml")) == config
    assert type(config).from_json_file(json_file=str(tmp_path / "again")) == config


def test_a_loaded_file_has_the_published_fields(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("distributed_type: 'NO'\n")
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type is DistributedType.NO
    assert (config.compute_environment, config.mixed_precision, config.num_processes) == ("LOCAL_MACHINE", None, 1)
    assert (config.fsdp_config, config.gpu_ids, config.use_cpu, config.debug) == ({}, None, False, False)
    path.write_text("distributed_type: NO\nmixed_precision: no\n")
    config = load_config_from_file(path)
    assert (config.distributed_type, config.mixed_precision) == (DistributedType.NO, "no"), "unquoted words"


def test_an_unknown_key_is_a_warning_at_the_callers_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: MULTI_CPU\nbogus: 1\n")
    for load in (load_config_from_file, ClusterConfig.from_yaml_file, ClusterConfig.from_json_file):
        with pytest.warns(UserWarning, match="nobody reads the key `bogus`") as caught:
            load(path)
        assert caught[0].filename == __file__


def test_the_default_file_is_loaded_without_a_name(file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_config_from_file(None)
    write_basic_config(save_location=file)
    assert load_config_from_file(None).to_dict() == BASIC


def test_a_sagemaker_file_without_its_role_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3\n")
    with pytest.raises(ValueError, match=r"config\.yaml lacks iam_role_name"):
        load_config_from_file(path)


def test_a_wrong_distributed_type_is_refused() -> None:
    with pytest.raises(ValueError, match="MULTI_GPPU"):
        ClusterConfig("LOCAL_MACHINE", "MULTI_GPPU", "no", False, False)
    assert ClusterConfig("LOCAL_MACHINE", "TPU", "no", False, False).distributed_type is DistributedType.XLA


# The way back: a file as flags


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ({}, "--cpu --num_processes 1"),
        (
            {"cpu": True, "num_processes": 2, "mixed_precision": "bf16"},
            "--cpu --mixed_precision bf16 --num_processes 2",
        ),
        ({"num_machines": 2, "num_processes": 4}, "--cpu --num_processes 4 --num_machines 2"),
        (
            {"num_machines": 2, "num_processes": 4, "main_process_ip": "10.0.0.1"},
            "--cpu --num_processes 4 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1",
        ),
        ({"multi_gpu": True}, "--multi_gpu"),
        ({"multi_gpu": True, "gpu_ids": "0,1"}, "--multi_gpu --num_processes 2 --gpu_ids 0,1"),
        ({"tpu": True, "vm": ["a", "b"]}, "--tpu --vm a --vm b"),
        ({"cpu": True, "log_dir": "my logs", "debug": True}, "--cpu --num_processes 1 --log_dir 'my logs' --debug"),
    ],
)
def test_a_file_can_be_said_by_flags(file: Path, flags: dict[str, Any], command: str) -> None:
    config_files.config_from_options(flags).to_yaml_file(file)
    assert config_files.launch_by_flags(read_config(file)) == f"meshwright launch {command} train.py"


@pytest.mark.parametrize("path", WRITTEN_BY_1_15, ids=lambda path: path.name)
def test_the_flags_of_a_file_are_flags_of_launch(path: Path) -> None:
    from meshwright.commands.launch import launch_command_parser

    words = config_files.launch_by_flags(read_config(path)).split()
    parsed = launch_command_parser().parse_args(words[2:])
    assert parsed.training_script == "train.py"


# The questions, through real prompts without a terminal


@pytest.fixture
def keyboard() -> Iterator[Any]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


@pytest.mark.parametrize(
    ("number", "keys", "answers"),
    [
        (0, ["\r", "\r", "\r", "\r"], {"cpu": True, "num_processes": 1, "mixed_precision": "no"}),
        (
            0,
            ["cpu\r", "\r", "2\r", "bf16\r", " " + DOWN + " \r"],
            {"cpu": True, "num_processes": 2, "mixed_precision": "bf16", "debug": True, "enable_cpu_affinity": True},
        ),
        (
            0,
            [DOWN + "\r", "2\r", DOWN + "\r", "16\r", "fp16\r", "\r"],  # down wraps around, over what is disabled
            {"gpu_ids": "all", "num_machines": 2, "num_processes": 16, "mixed_precision": "fp16"},
        ),
        (1, ["\r", "\r", "\r", "\r"], {"gpu_ids": "all", "num_processes": 1, "mixed_precision": "bf16"}),
        (4, ["\r", "\r", "\r", "\r", "\r", "\r"], {"gpu_ids": "all", "num_processes": 4, "mixed_precision": "bf16"}),
        (4, ["\r", "\r", "0,2\r", "\r", "\r"], {"gpu_ids": "0,2", "num_processes": 2, "mixed_precision": "bf16"}),
        (
            4,
            ["\r", "\r", "0,x\r", "\b9\r", "\b1\r", "\r", "\r"],
            {"gpu_ids": "0,1", "num_processes": 2, "mixed_precision": "bf16"},
        ),
        (4, ["cpu\r", "\r", "\r", "\r"], {"cpu": True, "num_processes": 1, "mixed_precision": "no"}),
        (
            2,
            ["\r", "3\r", "\r", "3\r", "\b2\r", "\r", "node 0\r", "\b\b0\r", "\r", "9\r", "\b6\r", "no\r", "\r"],
            {"gpu_ids": "all", "num_machines": 3, "machine_rank": 2, "main_process_ip": "node0"}
            | {"main_process_port": 29500, "num_processes": 6, "mixed_precision": "no"},
        ),
        (
            0,
            ["\r2\rmpi\rhosts\r10.0.0.1\r29501\r3\r\b4\r\r", f"{DOWN}{DOWN} {DOWN} \r", "5\r", "\r"],
            {"cpu": True, "num_machines": 2, "mpirun_hostfile": "hosts", "main_process_ip": "10.0.0.1"}
            | {"main_process_port": 29501, "num_processes": 4, "mixed_precision": "no", "max_restarts": 5}
            | {"log_dir": "logs"},
        ),
        (
            0,
            ["cpu\r", "\r", "2\r", "\r", DOWN * 4 + " " + DOWN + " \r", " " + DOWN + " \r"],
            {"cpu": True, "num_processes": 2, "mixed_precision": "no", "dynamo_backend": "inductor", "use_fsdp": True}
            | {"fsdp_version": "2", "fsdp_activation_checkpointing": "true", "fsdp_offload_params": "true"},
        ),
        (
            0,
            ["sage\r", "cpu\r", "\r", "x\r", "\b0\r", "\b3\r", "fp8\r", "\r"],
            {"cpu": True, "num_processes": 3, "mixed_precision": "fp8"},
        ),
    ],
)
def test_the_answers(
    monkeypatch: pytest.MonkeyPatch, keyboard: Any, number: int, keys: list[str], answers: dict[str, Any]
) -> None:
    accelerators(monkeypatch, number)
    keyboard.send_text("".join(keys))
    assert cluster.ask() == answers


def test_an_interrupt_leaves_the_questions(keyboard: Any) -> None:
    keyboard.send_text("\r" + INTERRUPT)
    with pytest.raises(KeyboardInterrupt):
        cluster.get_cluster_input()


def test_the_published_menu_returns_the_number_of_the_choice(keyboard: Any) -> None:
    from accelerate.commands.menu import BulletMenu

    menu = BulletMenu("Where?", ["here", "there", "nowhere"])
    keyboard.send_text("\r" + DOWN + "\r" + "\r")
    assert [menu.run(), menu.run(), menu.run(default_choice=2)] == [0, 1, 2]


# On a terminal


class Terminal:
    """`meshwright config` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.child = pexpect.spawn(
            str(COMMAND),
            ["config", *arguments],
            env=environment,
            encoding="utf-8",
            timeout=limit(30),
            dimensions=(40, 100),
        )

    def answer(self, question: str, keys: str) -> None:
        """Wait for a question, then type."""
        self.child.expect_exact(question)
        self.child.send(keys)

    def rest(self) -> tuple[int | None, str]:
        """Wait for the end; return the exit code and what was said since the last answer."""
        self.child.expect(pexpect.EOF)
        said_last = str(self.child.before).replace("\r\n", "\n")
        self.child.close()
        return self.child.exitstatus, said_last


def test_the_wizard_by_enter_alone(file: Path) -> None:
    terminal = Terminal()
    for question in ("Where should your script run?", "How many machines?", "How many processes", "number format"):
        terminal.answer(question, "\r")
    code, end = terminal.rest()
    assert code == 0
    assert said(file) == BASIC
    assert f"Wrote {file}:" in end
    assert "    use_cpu: true\n" in end
    assert "    meshwright launch train.py\n" in end
    assert "    meshwright launch --cpu --num_processes 1 train.py\n" in end


def test_the_wizard_by_arrows_and_typed_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    terminal = Terminal("--config_file", str(path))
    terminal.answer("SageMaker (not in this version yet)", "sage\r")
    terminal.answer("SageMaker cannot be chosen: not in this version yet", "cpu\r")
    terminal.answer("How many machines? [1]", "none\r")
    terminal.answer("'none' is not a whole number", "\b" * 4 + "1\r")
    terminal.answer("How many processes", "2\r")
    terminal.answer("number format", DOWN * 2 + "\r")
    terminal.answer("Anything else?", " \r")
    code, end = terminal.rest()
    assert code == 0
    answers = {"distributed_type": "MULTI_CPU", "num_processes": 2, "mixed_precision": "bf16", "debug": True}
    assert said(path) == {**BASIC, **answers}
    assert f"    meshwright launch --config_file {path} train.py\n" in end
    assert "    meshwright launch --cpu --mixed_precision bf16 --num_processes 2 --debug train.py\n" in end


@pytest.mark.parametrize("key", [INTERRUPT, END])
def test_an_interrupt_writes_nothing(file: Path, key: str) -> None:
    terminal = Terminal()
    terminal.answer("Where should your script run?", "\r")
    terminal.answer("How many machines?", key)
    code, end = terminal.rest()
    assert code == 130
    assert "Interrupted: nothing was written." in end
    assert "Traceback" not in end
    assert not file.exists()


def test_the_wizard_replaces_a_file_only_when_told(file: Path) -> None:
    write_basic_config("bf16", file)
    terminal = Terminal()
    terminal.answer("Replace it?", "n")
    assert terminal.rest()[0] == 0
    assert said(file)["mixed_precision"] == "bf16"
    terminal = Terminal()
    terminal.answer("Replace it?", "y")
    for question in ("Where should your script run?", "How many machines?", "How many processes", "number format"):
        terminal.answer(question, "\r")
    assert terminal.rest()[0] == 0
    assert said(file)["mixed_precision"] == "no"


# Beside accelerate 1.15


@pytest.mark.skipif(REFERENCE is None, reason="MESHWRIGHT_REFERENCE_PYTHON names no interpreter with accelerate 1.15")
def test_accelerate_1_15_reads_our_files_as_we_read_its(tmp_path: Path) -> None:
    ours = {
        "basic": {},
        "cpu": {"cpu": True, "num_processes": 2, "mixed_precision": "bf16", "debug": True},
        "machines": {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 1},
        "mpirun": {"cpu": True, "num_machines": 2, "num_processes": 4, "mpirun_hostfile": "hosts"},
        "gpu": {"multi_gpu": True, "gpu_ids": "0,1", "enable_cpu_affinity": True},
        "fsdp": {"use_fsdp": True, "fsdp_version": "2", "num_processes": 4, "parallelism_config_tp_size": 2},
        "deepspeed": {"use_deepspeed": True, "zero_stage": 3, "num_processes": 4, "gradient_accumulation_steps": 2},
        "fp8": {"mixed_precision": "fp8", "fp8_backend": "te", "dynamo_backend": "inductor"},
    }
    for name, flags in ours.items():
        config_files.config_from_options(flags).to_yaml_file(tmp_path / f"{name}.yaml")
    config_files.config_from_options({}).to_json_file(tmp_path / "basic.json")
    paths = [*map(str, WRITTEN_BY_1_15), *map(str, sorted(tmp_path.glob("*.*")))]
    code = "import json, sys; from accelerate.commands.config import load_config_from_file as load\n"
    code += "print(json.dumps([load(path).to_dict() for path in sys.argv[1:]]))"
    ran = subprocess.run([str(REFERENCE), "-c", code, *paths], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [load_config_from_file(path).to_dict() for path in paths]
