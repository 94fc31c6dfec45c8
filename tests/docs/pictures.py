"""Draw the pictures of README and docs from what real runs show: `python -m tests.docs.pictures [name ...]`.

Every script trains on scikit-learn's digits. Needs `rich` and a Chromium; the results are committed in docs/images.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from pathlib import Path

import pexpect

from tests.commands.views.browser import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLUMNS = 100

DIGITS = """\
import torch
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split
from accelerate import Accelerator

pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
torch.manual_seed(0)
train, test = random_split(digits, [0.8, 0.2])
"""

STUCK = """\
from digits import *

accelerator = Accelerator(cpu=True)
model = Sequential(Linear(64, 32), ReLU(), Linear(32, 10))
loader = DataLoader(train, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for step, (inputs, targets) in enumerate(loader):
    loss = cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process:
        losses = accelerator.gather(loss.detach())
        print(f"step {step}: loss {losses.mean():.3f}")
"""

LOGGED = """\
from digits import *

for rate in (1e-4, 1e-3, 1e-2):
    accelerator = Accelerator(cpu=True, log_with="jsonl")
    config = {"lr": rate, "batch_size": 64}
    accelerator.init_trackers("digits", config=config, init_kwargs={"jsonl": {"run": f"lr {rate:g}"}})
    torch.manual_seed(1)
    model = Sequential(Linear(64, 128), ReLU(), Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    loader, test_loader = DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=360)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs=60, steps_per_epoch=len(loader))
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    step = 0
    for epoch in range(60):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            accelerator.log({"train/loss": loss, "lr": schedule.get_last_lr()[0]}, step=step)
            step += 1
        with torch.no_grad():
            [right] = [model(inputs).argmax(1) == targets for inputs, targets in test_loader]
        accelerator.log({"eval/accuracy": right.float().mean()}, step=step)
    accelerator.end_training()
"""

SLOW = """\
import time
from digits import *

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40 * len(train)

    def __getitem__(self, index):
        time.sleep(0.0039 if accelerator.process_index == 2 else 0.003)
        return train[index % len(train)]

accelerator = Accelerator(cpu=True, log_with="jsonl")
accelerator.init_trackers("digits", init_kwargs={"jsonl": {"run": "baseline"}})
model = Sequential(Linear(64, 4096), ReLU(), Linear(4096, 10))
loader = DataLoader(Samples(), batch_size=10)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for step, (inputs, targets) in enumerate(loader):
    loss = cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss}, step=step)
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
    """Show what a rank-guarded gather ends with, after the default 30 seconds."""
    (folder / "train.py").write_text(STUCK)
    text = shown("accelerate launch --cpu --num_processes 4 train.py", folder)
    panel = text[text.rindex("── the run failed") :]
    start = text.rindex("\n", 0, text.index(panel)) + 1  # with the escape codes before it
    draw(text[start:].rstrip(), "accelerate launch --cpu --num_processes 4 train.py", IMAGES / "verdict.svg")


def report(folder: Path) -> None:
    """Show the page of three runs."""
    (folder / "train.py").write_text(LOGGED)
    shown(f"{sys.executable} train.py && accelerate report runs", folder)
    with Browser(folder, 1280, 760) as browser:
        browser.open(folder / "runs" / "report.html")
        browser.picture(IMAGES / "report.png")


def watch(folder: Path) -> None:
    """Show four ranks that train, of which one waits longer for its data."""
    (folder / "train.py").write_text(SLOW)
    training = "accelerate launch --cpu --num_processes 4 train.py & sleep 45"
    text = shown(f"{training}; timeout --foreground --signal INT 10 accelerate watch runs; kill %1; wait", folder)
    frame = text[text.rindex("baseline") :]  # the last one, which stays
    draw(frame.partition("accelerate launch")[0].rstrip(), "accelerate watch runs", IMAGES / "watch.svg")


PICTURES = {"verdict": verdict, "report": report, "watch": watch}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "digits.py").write_text(DIGITS)
            PICTURES[name](Path(directory))
        print(f"drew {name}")
