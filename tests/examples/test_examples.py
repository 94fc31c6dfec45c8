"""Every example runs on one process and on two, and reaches what its docstring says.

Most are run by warm workers, as `python` would run them; some are started as their users start them, by torchrun and by
`meshwright launch`, because that is what they show.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from safetensors.torch import load_file

from tests.launching import THROUGH, end_tree, environment, run_accelerate, run_script, start_accelerate
from tests.ranks import run_on_ranks
from tests.sizes import at_night, on_two_processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *options: str, world_size: int, directory: Path) -> str:
    """Run an example on warm workers and return what all of them printed, rank 0's lines first."""
    if THROUGH:
        return run_script(EXAMPLES / name, *options, world_size=world_size, directory=directory)
    printed = run_on_ranks(world_size, run_here, script=EXAMPLES / name, options=options, directory=directory)
    return "".join(printed)


def run_here(script: Path, options: tuple[str, ...], directory: Path) -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(directory)
        patch.setattr(sys, "argv", [str(script), *options])
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def numbers_after(words: str, printed: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(rf"{words} (\d[\d.,]*(?:e[+-]\d+)?)", printed)]


def number_after(words: str, printed: str) -> float:
    (number,) = numbers_after(words, printed)
    return number


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_minimal_loop(tmp_path: Path) -> None:
    script = EXAMPLES / "minimal_loop.py"
    printed = [run_script(script, world_size=world_size, directory=tmp_path) for world_size in (1, 2)]
    alone, together = (numbers_after("accuracy", text) for text in printed)
    assert len(alone) == len(together) == 1, "printed once"
    assert alone[0] >= 0.96
    assert together[0] == pytest.approx(alone[0], abs=1 / 359 + 1e-4), "sums in another order may move one digit"
    assert all(text.count("on 359 digits") == 1 for text in printed)


def test_minimal_loop_adds_five_lines() -> None:
    text = (EXAMPLES / "minimal_loop.py").read_text()
    assert re.findall(r"# (\d)", text) == ["1", "2", "3", "4", "5"]
    unmarked = [line for line in text.partition('"""\n\n')[2].splitlines() if not re.search(r"# \d", line)]
    assert not [line for line in unmarked if "accelerat" in line and not line.startswith("accelerator.print(")]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        at_night(1, []),
        (2, []),
        at_night(1, ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "2"]),
        at_night(2, ["--mixed_precision", "bf16", "--batch_size", "16", "--gradient_accumulation_steps", "2"]),
    ],
)
def test_digits_cnn(world_size: int, options: list[str], tmp_path: Path) -> None:
    printed = run_example("digits_cnn.py", *options, world_size=world_size, directory=tmp_path)
    accuracies = numbers_after("accuracy", printed)
    assert len(accuracies) == 6
    assert accuracies[-1] >= 0.975
    weights = torch.load(tmp_path / "digits_cnn.pt", weights_only=True)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    runpy.run_path(str(EXAMPLES / "digits_cnn.py"))["small_cnn"]().load_state_dict(weights)


@on_two_processes
@pytest.mark.parametrize("precision", ["fp16", at_night("bf16")])
def test_mixed_precision(precision: str, world_size: int, tmp_path: Path) -> None:
    options = ("--mixed_precision", precision)
    printed = run_example("mixed_precision.py", *options, world_size=world_size, directory=tmp_path)
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    assert f"computed in torch.{dtype}, weights in torch.float32" in printed
    assert number_after("accuracy", printed) >= 0.95
    if precision == "bf16":
        assert "scale" not in printed
    else:
        skipped, scale = number_after("skipped", printed), number_after("the scale is", printed)
        assert 1 <= skipped <= 15
        assert scale == 2 ** (24 - skipped)


@on_two_processes
def test_accumulation(world_size: int, tmp_path: Path) -> None:
    printed = run_example("accumulation.py", world_size=world_size, directory=tmp_path)
    assert re.findall(r"(\d x \d+): (\d+) steps", printed) == [("1 x 32", "224"), ("4 x 8", "224")]
    assert number_after("largest difference", printed) < 1e-5
    assert min(numbers_after("accuracy", printed)) >= 0.955


@on_two_processes
def test_token_exact_loss(world_size: int, tmp_path: Path) -> None:
    printed = run_example("token_exact_loss.py", world_size=world_size, directory=tmp_path)
    exact, mean_of_means = number_after("gradient:", printed), number_after("mean of means:", printed)
    assert exact < 1e-5 < 1e-3 < mean_of_means
    losses = numbers_after("loss per token", printed)
    assert len(losses) == 6
    assert losses[-1] < 0.07


@on_two_processes
def test_metrics(world_size: int, tmp_path: Path) -> None:
    printed = run_example("metrics.py", world_size=world_size, directory=tmp_path)
    assert f"gather: {359 if world_size == 1 else 384} answers, gather_for_metrics: 359\n" in printed
    assert "in the order of the data: True" in printed
    confusion = [list(map(int, row.split())) for row in re.findall(r"\[([ \d]+)\]", printed)]
    assert [len(row) for row in confusion] == [10] * 10
    assert sum(map(sum, confusion)) == 359
    assert number_after("F1", printed) >= 0.955


@on_two_processes
def test_schedule_free(world_size: int, tmp_path: Path) -> None:
    printed = run_example("schedule_free.py", world_size=world_size, directory=tmp_path)
    averages, newest = numbers_after("accuracy", printed), numbers_after("newest weights:", printed)
    assert len(averages) == 6
    assert averages[-1] >= 0.955
    assert averages != newest, "`eval` reaches the optimizer"


@on_two_processes
def test_early_stop(world_size: int, tmp_path: Path) -> None:
    printed = run_example("early_stop.py", world_size=world_size, directory=tmp_path)
    losses = numbers_after("loss", printed)
    assert len(losses) < 40
    best = min(losses)
    assert losses.index(best) == len(losses) - 3, "two epochs without progress"
    assert best < 0.2
    for rank in range(world_size):
        assert f"rank {rank} stopped after {len(losses)} epochs: best {best:.4f}, loaded {best:.4f}" in printed


@on_two_processes
def test_k_fold(world_size: int, tmp_path: Path) -> None:
    printed = run_example("k_fold.py", world_size=world_size, directory=tmp_path)
    assert sorted(re.findall(r"fold \d: [\d.]+ of (\d+)", printed)) == ["359"] * 3 + ["360"] * 2
    assert number_after("all folds: accuracy", printed) >= 0.935
    assert "of 1797 digits" in printed


@on_two_processes
def test_gan(world_size: int, tmp_path: Path) -> None:
    printed = run_example("gan.py", world_size=world_size, directory=tmp_path)
    distances, emptiest = numbers_after("distance", printed), numbers_after("emptiest eighth", printed)
    assert distances[0] > 0.5
    assert distances[-1] < 0.1
    assert emptiest[-1] > 0.05, "an even ring has 0.125"


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "end"), [at_night(1, "SIGKILL"), (2, "SIGKILL"), at_night(1, "SIGTERM")])
def test_resume(world_size: int, end: str, tmp_path: Path) -> None:
    """End a run in the middle, start it again, and compare with one that nobody ended."""
    launch = ("launch", "--cpu", "--num_processes", world_size)
    process = start_accelerate(*launch, EXAMPLES / "resume.py", directory=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "no checkpoint yet\n"
    assert process.stdout.readline() == "epoch 1, step 20: saved\n"
    saves_first = end == "SIGTERM"
    if saves_first:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        end_tree(process.pid)  # as a power cut does: launcher and ranks at once
    printed, _ = process.communicate(timeout=300)
    assert "end: " not in printed
    assert process.returncode == (75 if saves_first else -signal.SIGKILL)

    options = ("--pause", "0")
    resumed = run_example("resume.py", *options, world_size=world_size, directory=tmp_path)
    assert number_after("resumed after step", resumed) in (range(20, 41) if saves_first else (20, 40))
    whole = run_example("resume.py", *options, "--project", "whole", world_size=world_size, directory=tmp_path)
    assert "resumed" not in whole
    last_lines = "end: step" + whole.partition("end: step")[2]
    assert resumed.endswith(last_lines), "to the last bit"
    assert number_after("accuracy", last_lines) >= 0.92

    again = run_example("resume.py", *options, world_size=world_size, directory=tmp_path)
    assert again == f"resumed after step {360 // world_size}\n" + last_lines, "a run that has ended does nothing more"


@on_two_processes
def test_save_hooks(world_size: int, tmp_path: Path) -> None:
    printed = run_example("save_hooks.py", world_size=world_size, directory=tmp_path)
    assert "in the checkpoint: 2,570 of 85,002 weights" in printed
    trained, forgotten, loaded = (number_after(word, printed) for word in ("trained", "forgotten", "loaded"))
    assert trained == loaded >= 0.9
    assert forgotten < 0.2
    files = {path.name for path in (tmp_path / "save_hooks").iterdir()}
    assert "head.safetensors" in files
    assert "optimizer.bin" in files
    assert not [name for name in files if name.startswith("model")]


@on_two_processes
def test_trackers(world_size: int, tmp_path: Path) -> None:
    printed = run_example("trackers.py", world_size=world_size, directory=tmp_path)
    lowest = number_after("lowest loss", printed)
    assert lowest < 0.2
    [file] = tmp_path.rglob("runs/trackers/digits/*/metrics.jsonl")
    records = map(json.loads, file.read_text().splitlines())
    losses = [record["values"]["loss"] for record in records if "values" in record]
    assert printed == f"{len(losses)} steps, lowest loss {min(losses):.4f} at step {losses.index(min(losses)) + 1}\n"
    report = run_accelerate("report", "runs/trackers", directory=tmp_path)
    assert report.code == 0, report.complaints


# --- larger models, and elsewhere -------------------------------------------------------------------------------------


@on_two_processes
def test_language_model_fsdp(world_size: int, tmp_path: Path) -> None:
    script = EXAMPLES / "language_model_fsdp.py"
    if world_size == 1:
        printed = run_example(script.name, world_size=1, directory=tmp_path)
    else:
        options = ("--cpu", "--num_processes", 2, "--use_fsdp", "--fsdp_version", 2)
        launched = run_accelerate("launch", *options, script, directory=tmp_path)
        assert launched.code == 0, launched.complaints
        printed = launched.printed
    assert re.findall(r"holds (\d+)% of", printed) == {1: ["100"], 2: ["50", "50"]}[world_size]
    losses = numbers_after("loss", printed)
    assert losses[0] > 4
    assert losses[-1] < 2.6
    assert "the saved model computes the same: True" in printed
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "language_model/model.safetensors").values()) > 100_000


@on_two_processes
def test_experts(world_size: int, tmp_path: Path) -> None:
    printed = run_example("experts.py", world_size=world_size, directory=tmp_path)
    losses = numbers_after("loss", printed)
    assert losses[-1] < 0.4 * losses[0]
    imbalances = numbers_after("imbalance", printed)
    assert len(imbalances) == {1: 0, 2: len(losses)}[world_size], "one process spreads nothing"
    assert all(1 <= imbalance < 3 for imbalance in imbalances)


@on_two_processes
def test_distributed_inference(world_size: int, tmp_path: Path) -> None:
    printed = run_example("distributed_inference.py", world_size=world_size, directory=tmp_path)
    assert re.findall(r"answered (\d+)", printed) == {1: ["101"], 2: ["51", "50"]}[world_size]
    assert "101 answers, those of the plain model: True" in printed


WEIGHTS = [at_night(1, []), at_night(2, []), (2, ["--shard"])]


@pytest.mark.parametrize(("world_size", "options"), WEIGHTS)
def test_serve_weights(world_size: int, options: list[str], tmp_path: Path) -> None:
    printed = run_example("serve_weights.py", *options, world_size=world_size, directory=tmp_path)
    assert "4 tensors, in " in printed
    assert number_after("differs by", printed) == 0.0


@pytest.mark.parametrize(("world_size", "options"), WEIGHTS)
def test_export_weights(world_size: int, options: list[str], tmp_path: Path) -> None:
    printed = run_example("export_weights.py", *options, world_size=world_size, directory=tmp_path)
    assert "9 tensors in 3 files, different 0" in printed
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(("world_size", "options"), WEIGHTS)
def test_teacher_weights(world_size: int, options: list[str], tmp_path: Path) -> None:
    printed = run_example("teacher_weights.py", *options, world_size=world_size, directory=tmp_path)
    assert number_after("accuracy", printed) > 0.9
    assert number_after("differ by", printed) == 0.0


def test_notebook(tmp_path: Path) -> None:
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not [cell for cell in book.cells if cell.get("outputs")], "it is stored without outputs"
    client = nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment(tmp_path))
    printed = "".join(output.text for cell in book.cells for output in cell.get("outputs", []) if "text" in output)
    assert sorted(re.findall(r"process (\d of \d)", printed)) == ["1 of 1", "1 of 2", "2 of 2"]
    accuracies = numbers_after("accuracy", printed)
    assert len(accuracies) == 3
    assert min(accuracies) >= 0.955
    assert "a 0, taken for a 0" in printed


# --- all of them ------------------------------------------------------------------------------------------------------


def all_examples() -> list[Path]:
    return sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")])


def test_every_example_is_tested_and_listed() -> None:
    assert not [path.name for path in all_examples() if f"test_{path.stem}" not in globals()]
    listed = re.findall(r"^\| \[`(\S+)`\]\((\S+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [(path.name, path.name) for path in all_examples()]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_says_how_it_is_launched(path: Path) -> None:
    docstring = path.read_text().split('"""')[1]
    assert re.search(rf"^    (meshwright launch|torchrun) .*examples/{path.name}", docstring, re.MULTILINE)
