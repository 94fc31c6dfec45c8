"""`meshwright launch` as people type it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.commands.launch import launch_command, launch_command_parser
from tests.launching import COMMAND, environment, run_accelerate

SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
print(json.dumps({name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "pid": os.getpid()}))
"""

TRAIN = """
import torch
from meshwright import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(1.0 + accelerator.process_index))
accelerator.print(accelerator.num_processes, accelerator.device, accelerator.mixed_precision, total.item())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def shown(text: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in text.splitlines()]
    return sorted(lines, key=lambda line: str(line["RANK"]))


def test_one_process_is_the_script_itself(folder: Path) -> None:
    process = subprocess.Popen(
        [str(COMMAND), "launch", "--mixed-precision=bf16", "show.py", "--lr", "1", "--cpu"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
    )
    (line,) = shown(process.communicate(timeout=300)[0])
    assert line["pid"] == process.pid, "the launcher was replaced"
    assert line["argv"] == ["--lr", "1", "--cpu"], "flags after the script are the script's"
    assert (line["RANK"], line["ACCELERATE_MIXED_PRECISION"], line["ACCELERATE_USE_CPU"]) == (None, "bf16", "False")


def test_cpu_and_num_processes_4_mean_four_processes(folder: Path) -> None:
    launched = run_accelerate("launch", "--cpu", "--num-processes", 4, "show.py", directory=folder)
    assert launched.code == 0, launched.complaints
    lines = shown(launched.printed)
    assert [line["RANK"] for line in lines] == ["0", "1", "2", "3"]
    assert {line["WORLD_SIZE"] for line in lines} == {"4"}
    assert launched.complaints == ""


def test_a_training_script_computes_together(folder: Path) -> None:
    words = ("launch", "--multi_gpu", "--num_machines=1", "--num_processes=2", "--mixed_precision", "bf16", "train.py")
    launched = run_accelerate(*words, directory=folder)
    assert launched.printed == "2 cpu bf16 3.0\n", launched.complaints
    assert "no GPU or other accelerator is there (flag --multi_gpu needs one)" in launched.complaints


def test_a_module_and_a_program_of_its_own(folder: Path) -> None:
    module = run_accelerate("launch", "--cpu", "--num_processes", 2, "-m", "show", "x", directory=folder)
    assert [line["argv"] for line in shown(module.printed)] == [["x"], ["x"]]
    program = run_accelerate("launch", "--no_python", "echo", "hello", directory=folder)
    assert program.printed == "hello\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--num_proceses", "2", "show.py"], "--num_proceses is unknown. Did you mean --num_processes?"),
        (["--mixed_precision", "fp17", "show.py"], "invalid choice: 'fp17'"),
        (["--use_megatron_lm", "--megatron_lm_eod_mask_loss", "true", "show.py"], "eod_mask_loss=True) cannot be used"),
        (["--config_file", "none.yaml", "show.py"], "none.yaml does not exist"),
        (["--num_machines", "2", "--machine_rank", "0", "show.py"], "give --main_process_ip"),
        (["--num_processes", "2", "--rdzv_conf", "timeout", "show.py"], "write key=value"),
        ([], "the following arguments are required: SCRIPT\n"),
        (["--num_processes", "0", "show.py"], "num_processes is 0 (flag --num_processes): it must be 1 or more."),
    ],
)
def test_a_mistake_is_answered_in_a_sentence(words: list[str], complaint: str, folder: Path) -> None:
    launched = run_accelerate("launch", *words, directory=folder)
    assert launched.code == 2
    assert complaint in launched.complaints
    assert "Traceback" not in launched.complaints


def test_a_misspelt_key_of_the_file_ends_the_launch_unless_it_is_lenient(folder: Path) -> None:
    (folder / "config.yaml").write_text("use_cpu: true\nnum_procesess: 2\n")
    refused = run_accelerate("launch", "--config_file", "config.yaml", "show.py", directory=folder)
    assert refused.code == 2
    assert "nobody reads the key `num_procesess`. Did you mean num_processes?" in refused.complaints
    assert "--lenient" in refused.complaints
    lenient = run_accelerate("launch", "--config_file", "config.yaml", "--lenient", "show.py", directory=folder)
    assert lenient.code == 0
    assert "nobody reads the key `num_procesess`" in lenient.complaints


def test_an_option_of_the_launch_after_the_script_is_noticed(folder: Path) -> None:
    noticed = run_accelerate("launch", "--cpu", "show.py", "--num_processes", "2", directory=folder)
    assert noticed.code == 0
    assert "--num_processes comes after show.py, so it is passed to the script" in noticed.complaints
    (folder / "own.py").write_text("import argparse  # --num_processes is an option of its own\n")
    silent = run_accelerate("launch", "--cpu", "own.py", "--num_processes", "2", directory=folder)
    assert (silent.code, silent.complaints) == (0, "")


def test_a_missing_script_is_told_before_anything_starts(folder: Path) -> None:
    launched = run_accelerate("launch", "--cpu", "--num_processes", 2, "nowhere.py", directory=folder)
    assert launched.complaints == f"meshwright launch: There is no script nowhere.py in {folder}.\n"
    assert launched.code == 2


def test_a_taken_port_is_named_and_a_free_one_is_the_default(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        words = ("launch", "--cpu", "--num_processes", 2, "--main_process_port", port, "show.py")
        launched = run_accelerate(*words, directory=folder)
    assert launched.code == 2
    assert f"Port {port} on this machine" in launched.complaints


def test_a_port_that_is_taken_meanwhile_is_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import signal
import socket
from meshwright.launch import plan
from meshwright.commands.launch import launch_command, launch_command_parser
holder = socket.create_server(("", 0))
taken = [holder.getsockname()[1]]
free_port = plan.get_free_port
plan.get_free_port = lambda: taken.pop() if taken else free_port()
launch_command(launch_command_parser().parse_args(["--cpu", "--num_processes", "2", "show.py"]))
assert not taken
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert len(shown(ended.stdout)) == 2


def test_explain_translates_the_settings_of_megatron_line_by_line(folder: Path) -> None:
    megatron = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 4, "use_distributed_optimizer": "true"}
    flags = [word for name, value in megatron.items() for word in (f"--megatron_lm_{name}", value)]
    said = run_accelerate(
        *("launch", "--explain", "--cpu", "--num_processes", 8, "--use_megatron_lm", *flags, "show.py"),
        directory=folder,
    ).printed
    _, _, table = said.partition("Megatron-LM's settings, on torch's engines\n")
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert lines[0] == "tp_degree 2 tp_size=2, by the plan that the model carries"
    assert [line.split()[0] for line in lines[1:5]] == [
        *("pp_degree", "num_micro_batches", "use_distributed_optimizer", "gradient_clipping")
    ]
    assert lines[5] == "other processes - dp_shard_size=-1: see different samples"
    assert "2 groups of processes with the same samples x 4 micro-batches x the loader's batch size" in said


def test_explain_starts_nothing_and_tells_every_origin(folder: Path) -> None:
    (folder / "config.yaml").write_text("mixed_precision: fp16\nnum_processes: 2\nnum_procs: 3\n")
    launched = run_accelerate(
        *("launch", "--explain", "--config_file", "config.yaml", "--gradient_accumulation_steps", 3, "show.py"),
        directory=folder,
        ACCELERATE_DEBUG_MODE="1",
    )
    assert launched.code == 0, launched.complaints
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in launched.printed.splitlines() if line.strip()}
    assert rows["mixed_precision"] == "fp16 config.yaml: mixed_precision"
    assert rows["num_processes"] == "2 config.yaml: num_processes"
    assert rows["debug"] == "True environment variable ACCELERATE_DEBUG_MODE"
    assert rows["gradient_accumulation_steps"] == "3 flag --gradient_accumulation_steps"
    assert rows["max_restarts"] == "0 default"
    assert "6 x batch_size samples" in launched.printed
    assert "nobody reads the key `num_procs`. Did you mean num_processes?" in launched.printed
    assert '"RANK"' not in launched.printed


def test_output_goes_to_files_and_the_terminal_shows_the_main_process(folder: Path) -> None:
    (folder / "talk.py").write_text("import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    words = ("launch", "--cpu", "--num_processes", 2)
    launched = run_accelerate(*words, "--log_dir", "logs", "talk.py", directory=folder)
    assert launched.printed == "[rank 0] out 0\n"
    assert launched.complaints == "[rank 0] err\n"
    files = sorted(path.relative_to(folder).parts[-2:] for path in (folder / "logs").rglob("std*.log"))
    assert files == [(rank, f"{stream}.log") for rank in "01" for stream in ("stderr", "stdout")]
    everyone = run_accelerate(*words, "--tee", "1", "--log_dir", "logs2", "talk.py", directory=folder)
    assert sorted(everyone.printed.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]


def test_the_parents_environment_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HOME", str(folder / "hf_home"))
    before = dict(os.environ)
    arguments = launch_command_parser().parse_args(
        ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "show.py"]
    )
    launch_command(arguments)
    assert dict(os.environ) == before
    arguments = launch_command_parser().parse_args(["--cpu", "--num_processes", "2", "missing.py"])
    with pytest.raises(SystemExit) as ending:
        launch_command(arguments)
    assert ending.value.code == 2
    assert dict(os.environ) == before


def test_a_launch_of_one_process_from_python_returns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HOME", str(folder / "hf_home"))
    (folder / "one.py").write_text(
        "import os, pathlib; pathlib.Path('format').write_text(os.environ['ACCELERATE_MIXED_PRECISION'])"
    )
    words = ["--cpu", "--num_processes", "1", "--mixed_precision", "bf16", "one.py"]
    launch_command(launch_command_parser().parse_args(words))
    assert (folder / "format").read_text() == "bf16"
    (folder / "one.py").write_text(
        "import os, signal, sys; os.kill(os.getpid(), signal.SIGTERM) if sys.argv[1:] else sys.exit(7)"
    )
    for arguments, code in ((words, 7), ([*words, "killed"], 128 + signal.SIGTERM)):
        with pytest.raises(SystemExit) as ending:
            launch_command(launch_command_parser().parse_args(arguments))
        assert ending.value.code == code


def test_a_launch_of_one_process_from_python_hands_signals_on(folder: Path) -> None:
    (folder / "wait.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    program = (
        "from meshwright.commands.launch import launch_command, launch_command_parser\n"
        "launch_command(launch_command_parser().parse_args(['--cpu', '--num_processes', '1', 'wait.py']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.terminate()
        assert launcher.wait(timeout=300) == 5


def test_affinity_gives_each_process_its_cores(folder: Path) -> None:
    (folder / "cores.py").write_text(
        "import os\nfrom accelerate import PartialState\nPartialState()\nprint(sorted(os.sched_getaffinity(0)))"
    )
    launched = run_accelerate(
        *("launch", "--cpu", "--num_processes", 2, "--enable_cpu_affinity", "cores.py"), directory=folder
    )
    shares = [json.loads(line) for line in launched.printed.splitlines()]
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) > 1:
        assert sorted(core for share in shares for core in share) == allowed, launched.complaints
    else:
        assert shares == [allowed, allowed]
