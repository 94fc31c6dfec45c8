"""Draw the pictures of README and docs from what the real commands show: `python -m tests.docs.pictures [name ...]`.

Needs `rich` and a Chromium; the results are committed in docs/images.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from pathlib import Path

import pexpect

from tests.report.browser import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLUMNS = 100

STUCK = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(100):
    loss = model(torch.randn(4, 8)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process:
        losses = accelerator.gather(loss.detach())
        print(f"step {step}: loss {losses.mean():.3f}")
"""

LOGGED = """\
import math, random
from accelerate import Accelerator

for run, rate in {"lr 1e-3": 1e-3, "lr 3e-3": 3e-3, "lr 1e-2": 1e-2}.items():
    accelerator = Accelerator(cpu=True, log_with="jsonl")
    accelerator.init_trackers("digits", config={"lr": rate, "batch_size": 64}, init_kwargs={"jsonl": {"run": run}})
    random.seed(run)
    for step in range(2000):
        loss = 2.3 * math.exp(-step * rate / 2) + 0.1 + random.gauss(0, 0.05)
        values = {"train/loss": loss, "lr": rate * min(1, step / 100)}
        if step % 100 == 0:
            values["eval/accuracy"] = 0.98 - 0.88 * math.exp(-step * rate / 2)
        accelerator.log(values, step=step)
    accelerator.end_training()
"""

SLOW = """\
import time, torch
from accelerate import Accelerator

class Samples(torch.utils.data.Dataset):
    def __len__(self): return 1600
    def __getitem__(self, index):
        time.sleep(0.0039 if accelerator.process_index == 2 else 0.003)
        return torch.randn(8)

accelerator = Accelerator(cpu=True, log_with="jsonl")
accelerator.init_trackers("digits", init_kwargs={"jsonl": {"run": "baseline"}})
model = torch.nn.Linear(8, 1)
loader = torch.utils.data.DataLoader(Samples(), batch_size=10)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
for epoch in range(2):
    for step, batch in enumerate(loader):
        loss = model(batch).square().mean()
        time.sleep(0.025)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss}, step=step)
accelerator.wait_for_everyone()
"""


def shown(command: str, folder: Path, **variables: str) -> str:
    """Return what a command writes to a terminal, with its colours."""
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    child = pexpect.spawn(
        "bash", ["-c", command], cwd=str(folder), env=os.environ | variables, encoding="utf-8", timeout=120,
        dimensions=(50, COLUMNS),
    )  # fmt: skip
    child.expect(pexpect.EOF)
    return str(child.before).replace("\r\n", "\n")


def draw(text: str, title: str, file: Path) -> None:
    """Write what a terminal shows as an SVG that loads nothing from anywhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title)
    file.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "monospace"))


def verdict(folder: Path) -> None:
    """Show what a rank-guarded gather ends with."""
    (folder / "train.py").write_text(STUCK)
    text = shown("accelerate launch --cpu --num_processes 4 train.py", folder, ACCELERATE_HANG_SECONDS="3")
    panel = text[text.rindex("── the run failed") :]
    start = text.rindex("\n", 0, text.index(panel)) + 1  # with the escape codes before it
    draw(text[start:].rstrip(), "accelerate launch --num_processes 4 train.py", IMAGES / "verdict.svg")


def report(folder: Path) -> None:
    """Show the page of three runs."""
    (folder / "train.py").write_text(LOGGED)
    shown(f"{sys.executable} train.py && accelerate report runs", folder)
    with Browser(folder, 1280, 760) as browser:
        browser.open(folder / "runs" / "report.html")
        browser.picture(IMAGES / "report.png")


def watch(folder: Path) -> None:
    """Show four ranks, of which one waits longer for its data."""
    (folder / "train.py").write_text(SLOW)
    shown("accelerate launch --cpu --num_processes 4 train.py", folder)
    text = shown("accelerate watch runs", folder)
    frame = text[text.rindex("baseline") :]  # the last one, which stays
    draw(frame.rstrip(), "accelerate watch", IMAGES / "watch.svg")


PICTURES = {"verdict": verdict, "report": report, "watch": watch}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as directory:
            PICTURES[name](Path(directory))
        print(f"drew {name}")
