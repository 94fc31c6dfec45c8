"""The progress bar of a run: one per run, with the time left, beside what the script prints."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from meshwright import Accelerator
from meshwright.runtime.loop import run_bar
from tests.ranks import ranks

SCRIPT = """
import torch, time
from meshwright import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (batch,) in enumerate(accelerator.progress(loader)):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    accelerator.print(f"printed {step}")
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def lines_at_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_bar.RunBar, "pause", lambda self: 0.0)


def train(accelerator: Accelerator, epochs: int | None) -> None:
    """Train two epochs of six batches, with an evaluation after each."""
    model = torch.nn.Linear(4, 4)
    data = TensorDataset(torch.randn(12 * accelerator.num_processes, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader, other = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2)
    )
    for _ in range(2):
        for (batch,) in accelerator.progress(loader, epochs=epochs):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        for (batch,) in accelerator.progress(other) if epochs else other:
            with torch.no_grad():
                model(batch)
    accelerator.meter().stop()


def test_without_a_terminal_there_are_lines_that_count_all_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    train(Accelerator(cpu=True), epochs=2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "/12 " in line]
    assert [int(re.search(r"  (\d+)/12 ", line).group(1)) for line in lines] == [*range(1, 7), 6, *range(7, 13), 12]  # type: ignore[union-attr]
    assert lines[0].startswith("epoch 1/2")
    assert re.search(r"epoch 2/2  12/12 \(100%\)  .* samples/s .* 0:00 left, ends \d\d:\d\d$", lines[-1])


def test_without_a_number_of_epochs_each_has_its_own_bar(capsys: pytest.CaptureFixture[str]) -> None:
    train(Accelerator(cpu=True), epochs=None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines if "(100%)" in line] == [
        ["epoch 1", "6/6 (100%)"], ["epoch 1", "6/6 (100%)"], ["epoch 2", "6/6 (100%)"], ["epoch 2", "6/6 (100%)"],
    ]  # fmt: skip


class Stream(IterableDataset[torch.Tensor]):
    """Has no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randn(12, 4))


@pytest.mark.parametrize("epochs", [None, 2])
def test_of_a_stream_epochs_are_counted_and_their_batches(
    epochs: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=4))
    for _ in range(2):
        for _ in accelerator.progress(loader, epochs=epochs):
            pass
    assert accelerator._bar is None
    accelerator.meter().stop()
    of = "" if epochs is None else "/2"
    told = ["  ".join(line.split("  ")[:2]) for line in capsys.readouterr().err.splitlines()]
    assert told == [f"epoch {epoch}{of}  {count}" for epoch in (1, 2) for count in ("1", "2", "3", "3/3 (100%)")]


def test_a_loop_that_is_left_early_closes_its_bar() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2))
    for _ in accelerator.progress(loader, epochs=3):
        assert accelerator._bar is not None
        break
    assert accelerator._bar is None
    accelerator.meter().stop()


@ranks(2)
def test_only_the_main_process_has_a_bar() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2))
    for _ in accelerator.progress(loader):
        assert (accelerator._bar is not None) == accelerator.is_main_process
    accelerator.meter().stop()


@pytest.mark.parametrize("package", ["rich", "tqdm"])
def test_in_a_terminal_what_is_printed_stands_in_lines_of_its_own(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    without_rich = "import sys; sys.modules['rich.progress'] = None\n" if package == "tqdm" else ""
    (tmp_path / "script.py").write_text(without_rich + SCRIPT)
    child = pexpect.spawn(
        sys.executable,
        [str(tmp_path / "script.py")],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "300"},
        dimensions=(24, 300),
    )
    child.expect(pexpect.EOF, timeout=120)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", child.before.decode()).replace("\r", "\n")
    lines = [line.strip() for line in shown.split("\n")]
    for step in range(12):
        assert lines.count(f"printed {step}") == 1
    assert any(re.search(r"12/12.*samples/s.*0:00 left", line) for line in lines), shown
    assert child.wait() == 0
