"""The command line: exit codes, files written, and what the started processes see."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..registry import Observer, script


@dataclass
class Ended:
    """How a command ended, and what it said."""

    returncode: int | None
    stdout: str
    stderr: str


def run(*arguments: str) -> Ended:
    """Call the command line as a shell would.

    The process is forked from this one, which has imported torch already: that takes longer than all the rest.
    """
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}

    def command() -> None:
        for stream, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["accelerate", *arguments]
        from accelerate.commands.accelerate_cli import main

        sys.exit(main())

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    process.join(600)
    process.kill()
    return Ended(process.exitcode, Path("stdout.txt").read_text(), Path("stderr.txt").read_text())


def write(name: str, text: str) -> str:
    """Write a script and return its name."""
    Path(name).write_text(text)
    return name


@script("cli")
def launched_script_that_fails(observe: Observer) -> None:
    observe(code=run("launch", "--cpu", write("fails.py", "import sys; sys.exit(3)")).returncode)


@script("cli")
def launched_script_that_raises(observe: Observer) -> None:
    ended = run("launch", "--cpu", write("raises.py", "raise KeyError('here')"))
    observe(code=ended.returncode, told="KeyError: 'here'" in ended.stderr)


@script("cli")
def launched_script_with_arguments(observe: Observer) -> None:
    text = "import json, sys; print(json.dumps([__name__, sys.argv[1:]]))"
    ended = run("launch", "--cpu", write("says.py", text), "--lr", "0.1", "word", "--flag")
    observe(code=ended.returncode, said=json.loads(ended.stdout.splitlines()[-1]))


@script("cli")
def launched_module(observe: Observer) -> None:
    write("module.py", "import sys; print('module', sys.argv[1:])")
    ended = run("launch", "--cpu", "-m", "module", "word")
    observe(code=ended.returncode, said=ended.stdout.splitlines()[-1])


@script("cli")
def launched_variables(observe: Observer) -> None:
    names = (
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_USE_CPU",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "ACCELERATE_DYNAMO_BACKEND",
    )
    text = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {names!r}}}))"
    ended = run("launch", "--cpu", "--mixed_precision", "bf16", write("says.py", text))
    seen = json.loads(ended.stdout.splitlines()[-1])
    observe(code=ended.returncode, precision=seen["ACCELERATE_MIXED_PRECISION"])
    observe(cpu=seen["ACCELERATE_USE_CPU"].lower())


@script("cli")
def launch_with_a_bad_flag(observe: Observer) -> None:
    observe(code=run("launch", "--nonsense_flag", write("fine.py", "")).returncode)


@script("cli")
def launch_without_a_script(observe: Observer) -> None:
    observe(nothing=run("launch").returncode, missing=run("launch", "--cpu", "not-there.py").returncode)


@script("cli")
def launch_with_a_bad_value(observe: Observer) -> None:
    observe(code=run("launch", "--mixed_precision", "fp15", write("fine.py", "")).returncode)


@script("cli")
def launch_of_two_processes(observe: Observer) -> None:
    text = (
        "from accelerate import Accelerator\n"
        "a = Accelerator()\n"
        "import torch\n"
        "total = a.reduce(torch.tensor([a.process_index + 1.0]))\n"
        "a.print('total', total.item(), a.num_processes)\n"
        "raise SystemExit(0)\n"
    )
    ended = run(
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        "0",
        write("two.py", text),
    )
    observe(code=ended.returncode, lines=[line for line in ended.stdout.splitlines() if line.startswith("total")])


@script("cli")
def launch_with_a_config_file(observe: Observer) -> None:
    text = "import os; print(os.environ['ACCELERATE_MIXED_PRECISION'])"
    fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "bf16",
        "use_cpu": True,
    }
    Path("good.yaml").write_text(yaml.safe_dump({**fields, "num_processes": 1, "num_machines": 1}))
    ended = run("launch", "--config_file", "good.yaml", write("says.py", text))
    observe(code=ended.returncode, said=ended.stdout.splitlines()[-1:])
    ended = run("launch", "--config_file", "good.yaml", "--mixed_precision", "no", "says.py")
    observe(flag=ended.stdout.splitlines()[-1:])
    observe(missing=run("launch", "--config_file", "not-there.yaml", "says.py").returncode)


@script("cli")
def launch_with_an_unknown_key(observe: Observer) -> None:
    Path("odd.yaml").write_text(
        yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "use_cpu": True, "num_procesess": 1})
    )
    observe(code=run("launch", "--config_file", "odd.yaml", write("fine.py", "")).returncode)


@script("cli")
def config_default(observe: Observer) -> None:
    ended = run("config", "default", "--mixed_precision", "bf16")
    observe(code=ended.returncode)
    home = Path(os.environ["HF_HOME"])
    observe.files(home)
    (path,) = home.rglob("*.yaml")
    observe(written=dict(sorted(yaml.safe_load(path.read_text()).items())), json=path.read_text().startswith("{"))
    path.unlink()


@script("cli")
def config_default_into_a_file(observe: Observer) -> None:
    observe(code=run("config", "default", "--config_file", "mine.yaml").returncode)
    observe(written=dict(sorted(yaml.safe_load(Path("mine.yaml").read_text()).items())))


@script("cli")
def config_update(observe: Observer) -> None:
    fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "bf16",
        "use_cpu": True,
    }
    Path("old.yaml").write_text(yaml.safe_dump(fields))
    observe(code=run("config", "update", "--config_file", "old.yaml").returncode)
    observe(written=dict(sorted(yaml.safe_load(Path("old.yaml").read_text()).items())))


@script("cli")
def env_printed(observe: Observer) -> None:
    ended = run("env")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("- `")]
    observe(code=ended.returncode, version=any("`Accelerate` version" in line for line in lines))


@script("cli")
def self_test(observe: Observer) -> None:
    fields = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True, "num_processes": 1}
    Path("one.yaml").write_text(yaml.safe_dump(fields))
    ended = run("test", "--config_file", "one.yaml")
    observe(code=ended.returncode)


@script("cli")
def wrong_commands(observe: Observer) -> None:
    observe(none=run().returncode, unknown=run("nonsense").returncode)


@script("cli")
def merge_weights_of_nothing(observe: Observer) -> None:
    observe(no_folder=run("merge-weights").returncode, missing=run("merge-weights", "not-there", "out").returncode)


@script("cli")
def estimate_without_a_hub(observe: Observer) -> None:
    observe(no_model=run("estimate-memory").returncode, unknown=run("estimate-memory", "nobody/nothing").returncode)
