"""Every example runs, with python and with torchrun, and reaches what its docstring says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.launching import run_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
on_one_and_two = pytest.mark.parametrize("world_size", [1, 2])


def numbers_after(words: str, printed: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{words} ([\d.e+-]+)", printed)]


@on_one_and_two
def test_minimal_loop(world_size: int, tmp_path: Path) -> None:
    printed = run_script(EXAMPLES / "minimal_loop.py", world_size=world_size, directory=tmp_path)
    accuracies = numbers_after("accuracy", printed)
    assert len(accuracies) == world_size
    assert len(set(accuracies)) == 1
    assert accuracies[0] >= 0.96
    assert printed.count("on 359 digits") == world_size


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, []),
        (2, []),
        (1, ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "2"]),
        (2, ["--mixed_precision", "bf16", "--batch_size", "16", "--gradient_accumulation_steps", "2"]),
    ],
)
def test_digits_cnn(world_size: int, options: list[str], tmp_path: Path) -> None:
    printed = run_script(EXAMPLES / "digits_cnn.py", *options, world_size=world_size, directory=tmp_path)
    accuracies = numbers_after("accuracy", printed)
    assert len(accuracies) == 6
    assert accuracies[-1] >= 0.975
    weights = torch.load(tmp_path / "digits_cnn.pt", weights_only=True)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    runpy.run_path(str(EXAMPLES / "digits_cnn.py"))["small_cnn"]().load_state_dict(weights)


@on_one_and_two
def test_token_exact_loss(world_size: int, tmp_path: Path) -> None:
    printed = run_script(EXAMPLES / "token_exact_loss.py", world_size=world_size, directory=tmp_path)
    (exact,) = numbers_after("gradient:", printed)
    (mean_of_means,) = numbers_after("mean of means:", printed)
    assert exact < 1e-5 < 1e-3 < mean_of_means
    losses = numbers_after("loss per token", printed)
    assert len(losses) == 6
    assert losses[-1] < 0.07


def test_every_example_is_tested() -> None:
    tested = {"minimal_loop", "digits_cnn", "token_exact_loss"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_minimal_loop_adds_five_lines() -> None:
    text = (EXAMPLES / "minimal_loop.py").read_text()
    assert re.findall(r"# (\d)", text) == ["1", "2", "3", "4", "5"]
    unmarked = [line for line in text.partition('"""\n\n')[2].splitlines() if not re.search(r"# \d", line)]
    assert not [line for line in unmarked if "accelerat" in line]
