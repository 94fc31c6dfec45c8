"""The documents that users learn from must run as they are written, with python and with torchrun.

Code is taken from the documents when the test runs; `stage.py` says what stands in for what they take for granted.
Loops over a small problem are held against the same loop in bare PyTorch; the image classifiers must learn.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launching import run_script
from tests.sizes import on_two_processes

from . import stage
from .documents import DIRECTORY, python_blocks, statements

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="pip install --no-deps torchvision, and pillow"
)
pytestmark = [
    pytest.mark.skipif(not DIRECTORY.is_dir(), reason="the documents are not here: set SEED_DOCUMENTS"),
]

Perform = Callable[..., tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def perform(tmp_path: Path) -> Perform:
    """Run code on the stage; return what it printed, and every rank's report."""

    def perform(code: str, setting: str, world_size: int) -> tuple[str, list[dict[str, Any]]]:
        script = tmp_path / "script.py"
        script.write_text(code, encoding="utf-8")
        printed = run_script(Path(stage.__file__), setting, script, world_size=world_size, directory=tmp_path)
        reports = [torch.load(tmp_path / f"report-{rank}.pt", weights_only=True) for rank in range(world_size)]
        for report in reports[1:]:
            assert report["optimizer_steps"] == reports[0]["optimizer_steps"]
            torch.testing.assert_close(report["weights"], reports[0]["weights"], rtol=0, atol=0)
        return printed, reports

    return perform


def bare_pytorch(
    batch_size: int, *, epochs: int, filled_up: bool = False, window: int = 1, steps_at: int = 1, schedule: int = 0
) -> tuple[dict[str, Tensor], int]:
    """Train on the stage's problem without any library; return the weights and the number of optimizer steps.

    `filled_up` completes the last batch from the beginning, as several processes do to stay in step. Losses are
    divided by `window`; the optimizer steps after every `steps_at` batches and after the last; the schedule then
    advances by `schedule`.
    """
    names = stage.pairs()
    model, optimizer, scheduler = names["model"], names["optimizer"], names["lr_scheduler"]
    features, labels = stage.samples().tensors
    total, num_steps = len(features), 0
    for _ in range(epochs):
        for start in range(0, total, batch_size):
            stop = start + batch_size
            chosen = torch.arange(start, stop if filled_up else min(stop, total)) % total
            (nn.functional.cross_entropy(model(features[chosen]), labels[chosen]) / window).backward()
            if (start // batch_size + 1) % steps_at == 0 or stop >= total:
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
                for _ in range(schedule):
                    scheduler.step()
    return model.state_dict(), num_steps


def assert_trained_like(report: dict[str, Any], expected: tuple[dict[str, Tensor], int]) -> None:
    weights, num_steps = expected
    assert report["optimizer_steps"] == num_steps
    torch.testing.assert_close(report["weights"], weights)


def assert_loss_falls(report: dict[str, Any]) -> None:
    losses = report["losses"]
    per_epoch = len(losses) // stage.NUM_EPOCHS
    assert sum(losses[-per_epoch:]) < 0.5 * sum(losses[:per_epoch])


# --- 001: the digits classifier of one function -----------------------------------------------------------------------


@needs_torchvision
@on_two_processes
def test_001_trains_counts_and_saves(world_size: int, perform: Perform, tmp_path: Path) -> None:
    (block,) = python_blocks("001")
    # The document's own call is commented out and asks for MNIST's size; fewer steps want a lower learning rate.
    call = 'training_loop(epochs=2, lr=4e-5, batch_size=4, ckpt_path="digits.pt", mixed_precision="no")\n'
    printed, reports = perform(block + call, "nothing", world_size)

    assert printed.count("device cpu is used!") == 1
    first, last = (float(percent) for percent in re.findall(r"eval_metric= ([\d.]+)%", printed))
    assert last >= first
    assert last >= 80

    # Both loaders drop what does not fill a round of all processes.
    round_size = 4 * world_size
    for report in reports:
        assert report["numbers"]["num_elems"] == stage.MNIST.num_test // round_size * round_size
        assert report["numbers"]["eval_metric"] == pytest.approx(last / 100, abs=1e-4)
        assert report["optimizer_steps"] == 2 * (stage.MNIST.num_train // round_size)

    assert sorted(path.name for path in tmp_path.glob("digits.pt*")) == ["digits.pt_0", "digits.pt_1"]
    saved = torch.load(tmp_path / "digits.pt_1", weights_only=True)
    torch.testing.assert_close(saved, reports[0]["weights"], rtol=0, atol=0)
    names: dict[str, Any] = {}
    exec("from torch import nn\n" + next(part for part in statements(block) if "def create_net" in part), names)
    names["create_net"]().load_state_dict(saved)


# --- 002: the basic loop ----------------------------------------------------------------------------------------------


@on_two_processes
def test_002_basic_loop_with_its_names_taken_literally(world_size: int, perform: Perform) -> None:
    # It prepares train_dataloader and lr_scheduler but uses training_dataloader and scheduler. If those are the plain
    # objects, every process reads all data, and the schedule advances once per step: as in one plain process.
    _, basic, *_ = python_blocks("002")
    _, reports = perform(basic, "literal_names", world_size)
    assert_trained_like(reports[0], bare_pytorch(stage.BATCH_SIZE, epochs=1, schedule=1))


@on_two_processes
def test_002_basic_loop_as_it_is_meant(world_size: int, perform: Perform) -> None:
    _, basic, *_ = python_blocks("002")
    _, reports = perform(basic, "meant_names", world_size)
    expected = bare_pytorch(stage.BATCH_SIZE * world_size, epochs=1, filled_up=world_size > 1, schedule=world_size)
    assert_trained_like(reports[0], expected)


# --- 003: loop, fp16, classifier, accumulation ------------------------------------------------------------------------


@on_two_processes
def test_003_basic_loop(world_size: int, perform: Perform) -> None:
    basic, *_ = python_blocks("003")
    _, reports = perform(basic, "pairs", world_size)
    expected = bare_pytorch(stage.BATCH_SIZE * world_size, epochs=stage.NUM_EPOCHS, filled_up=world_size > 1)
    assert_trained_like(reports[0], expected)
    for report in reports:
        assert_loss_falls(report)


@on_two_processes
def test_003_fp16(world_size: int, perform: Perform) -> None:
    # The snippet is the constructor alone; "the rest" is that of the basic loop.
    basic, half, *_ = python_blocks("003")
    imports, _, *rest = statements(basic)
    _, reports = perform("".join([imports, half, *rest]), "pairs", world_size)
    for report in reports:
        assert {weight.dtype for weight in report["weights"].values()} == {torch.float32}
        assert_loss_falls(report)
    expected, _ = bare_pytorch(stage.BATCH_SIZE * world_size, epochs=stage.NUM_EPOCHS, filled_up=world_size > 1)
    assert reports[0]["weights"]["0.weight"].ne(expected["0.weight"]).any()
    torch.testing.assert_close(reports[0]["weights"], expected, rtol=0.1, atol=0.1)


@on_two_processes
def test_003_fp16_after_the_basic_loop_as_in_a_notebook(world_size: int, perform: Perform) -> None:
    # A second Accelerator prepares what the first one has prepared, and training goes on in fp16.
    basic, half, *_ = python_blocks("003")
    _, _, *rest = statements(basic)
    _, reports = perform("".join([basic, half, *rest]), "pairs", world_size)
    for report in reports:
        assert_loss_falls(report)
    trained_in_fp32, _ = bare_pytorch(
        stage.BATCH_SIZE * world_size, epochs=2 * stage.NUM_EPOCHS, filled_up=world_size > 1
    )
    torch.testing.assert_close(reports[0]["weights"], trained_in_fp32, rtol=0.1, atol=0.1)


@needs_torchvision
@on_two_processes
def test_003_image_classifier_in_fp16(world_size: int, perform: Perform) -> None:
    _, _, classifier, *_ = python_blocks("003")
    printed, reports = perform(classifier, "nothing", world_size)

    # The script prints from every process, and counts what its own process saw.
    losses = re.findall(r"Epoch: (\d)/5, Batch: 0, Loss: ([\d.]+)", printed)
    accuracies = re.findall(r"Epoch: (\d), Accuracy: ([\d.]+)%", printed)
    for printed_once_per_epoch in (losses, accuracies):
        assert sorted(epoch for epoch, _ in printed_once_per_epoch) == sorted("12345" * world_size)
    assert max(float(loss) for epoch, loss in losses if epoch == "5") < 2.0  # guessing costs ln 10 = 2.3
    assert min(float(percent) for epoch, percent in accuracies if epoch == "5") >= 80
    shares = {1: [stage.CIFAR10.num_test], 2: [64, 64]}[world_size]  # the second process's 16 are filled up to a batch
    assert [report["numbers"]["total"] for report in reports] == shares


@on_two_processes
def test_003_accumulation(world_size: int, perform: Perform) -> None:
    # The snippet makes an Accelerator and loops; preparing is left to the basic loop's own statement.
    basic, _, _, _, accumulation = python_blocks("003")
    imports, _, prepare, _ = statements(basic)
    make, loop = statements(accumulation)
    _, reports = perform("".join([imports, make, prepare, loop]), "dicts", world_size)
    expected = bare_pytorch(
        stage.BATCH_SIZE * world_size, epochs=stage.NUM_EPOCHS, filled_up=world_size > 1, window=4, steps_at=4
    )
    assert_trained_like(reports[0], expected)


@on_two_processes
def test_003_accumulation_taken_literally(world_size: int, perform: Perform) -> None:
    # Nothing is prepared, so nothing is shared and the plain optimizer steps every time; only the loss is divided.
    basic, _, _, _, accumulation = python_blocks("003")
    imports, *_ = statements(basic)
    _, reports = perform(imports + accumulation, "dicts", world_size)
    assert_trained_like(reports[0], bare_pytorch(stage.BATCH_SIZE, epochs=stage.NUM_EPOCHS, window=4))
