"""`meshwright plan` of our examples, as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshwright.commands.cli import main
from tests.launching import run_accelerate
from tests.sizes import cases

LINEAR = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from meshwright import Accelerator
accelerator = Accelerator()
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(32, 4), batch_size=2))
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
"""
EXAMPLES = Path(__file__).parents[2] / "examples"
REFUSED = {"distributed_inference", "experts"}
"""One only infers, and the tokens of the other depend on numbers: see `test_refusals`."""


@pytest.mark.parametrize(
    "example",
    cases(
        gate=["gan", "language_model_fsdp"],
        nightly=sorted(file.stem for file in EXAMPLES.glob("*.py") if file.stem not in REFUSED),
    ),
)
def test_an_example_is_planned_and_leaves_no_files(example: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    words = ("--gpus", "2xA100-80GB", "--json", tmp_path / "plan.json", EXAMPLES / f"{example}.py")
    done = run_accelerate("plan", *words, directory=tmp_path / "here", HF_HOME=str(tmp_path / "home"), time_limit=900.0)
    assert done.code == 0, done.complaints
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["world_size"] == 2
    assert plan["parameters"] >= plan["trained_parameters"] > 0
    assert plan["samples"] > 0
    assert plan["rates"]["seconds"] > 0
    assert {guess.rpartition(":")[0] for guess in plan["guesses"]} <= {str(EXAMPLES / f"{example}.py")}
    assert not list((tmp_path / "here").iterdir())


def test_a_missing_script_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_accelerate("plan", "--gpus", "8xH100", "trian.py", directory=tmp_path, PYTHONPATH=path)
    assert done.code == 2
    assert done.complaints == f"meshwright plan: there is no script trian.py in {tmp_path}.\n"


def test_options_behind_the_script_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LINEAR)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "train.py", "--gpus", "8xH100"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "meshwright plan: --gpus comes after train.py, so it is passed to the script." in told
    assert "To use it for the plan, put it before train.py." in told


def test_an_unknown_device_is_answered_with_the_nearest_and_the_way_to_describe_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LINEAR)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--gpus", "8xH101", "train.py"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "No accelerator is called 'H101'. Close names: H100-SXM, H100-PCIe, H100-96GB. " in told
    assert "V100" not in told
    assert "--devices_file FILE" in told


def test_json_without_a_file_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LINEAR)
    done = run_accelerate("plan", "--gpus", "2xH100", "--json", "train.py", directory=tmp_path)
    assert done.code == 0, done.complaints
    assert json.loads(done.printed)["parameters"] == 20
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["train.py"]
