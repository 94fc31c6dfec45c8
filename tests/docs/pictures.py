"""Draw the pictures of README and docs from what real runs show: `python -m tests.docs.pictures [name ...]`.

`check`, `verdict`, `watch` and `report` train on digits of scikit-learn; `plan` needs transformers beside an installed
wheel; pages need a Chromium. The results are committed in docs/images: pages in light and dark, and what the front
page shows also in a narrow version for phones.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pexpect

from tests.tools.report.browser import Browser

from .terminal import draw

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLUMNS = 100

DIGITS = """\
import torch
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split
from meshwright import Accelerator

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


UNPREPARED = """\
import torch
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))

accelerator = Accelerator()
model = Sequential(Linear(64, 32), ReLU(), Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(digits, batch_size=32)
model, optimizer = accelerator.prepare(model, optimizer)

for inputs, targets in loader:
    loss = cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

LARGE = """\
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator


class Tokens(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((8192,), index)


config = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
)
accelerator = Accelerator()
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
loader = DataLoader(Tokens(), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def shown(command: str, folder: Path, columns: int = COLUMNS, **variables: str) -> str:
    """Return what a command writes to a terminal, with its colours."""
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    child = pexpect.spawn(
        "bash", ["-c", command], cwd=str(folder), env=os.environ | variables, encoding="utf-8", timeout=900,
        dimensions=(50, columns),
    )  # fmt: skip
    child.expect(pexpect.EOF)
    return str(child.before).replace("\r\n", "\n")


def check(folder: Path) -> None:
    """Show what is said of a script whose loader was not prepared, below its last lines."""
    (folder / "train.py").write_text(UNPREPARED)
    command = "meshwright check --cpu --num_processes 2 train.py"
    for columns, end in ((COLUMNS, ""), (64, "-narrow")):
        listing = "cat -n train.py | tail -n 8"
        text = shown(command, folder, columns)
        assert "1 finding" in text, text
        lines = shown(listing, folder, columns)
        draw(
            f"$ {listing}\n{lines}$ {command}\n{text}".rstrip(),
            "train.py · 2 processes",
            IMAGES / f"check{end}.svg",
            columns,
        )


def verdict(folder: Path) -> None:
    """Show what a rank-guarded gather ends with, after the default 30 seconds."""
    (folder / "train.py").write_text(STUCK)
    command = "meshwright launch --cpu --num_processes 4 train.py"
    for columns, end in ((COLUMNS, ""), (62, "-narrow")):
        text = shown(command, folder, columns)
        panel = text[text.rindex("── the run failed") :]
        start = text.rindex("\n", 0, text.index(panel)) + 1  # with the escape codes before it
        draw(text[start:].rstrip(), "train.py · 4 processes", IMAGES / f"verdict{end}.svg", columns)


def _pictures_of_page(page: Path, folder: Path, name: str, narrow: str | None = None, **drawn: str) -> None:
    """Write a page as four pictures: light and dark, wide and for phones, where a selector can choose a part."""
    with Browser(folder) as browser:
        browser.send("Emulation.setScrollbarsHidden", hidden=True)
        for width, height, scale, end in ((1280, 900, 1.25, ""), (460, 1100, 1.6, "-narrow")):
            for scheme in ("light", "dark"):
                browser.send(
                    "Emulation.setDeviceMetricsOverride",
                    width=width, height=height, deviceScaleFactor=scale, mobile=False,
                )  # fmt: skip
                browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                browser.open(page, **drawn)
                browser.picture(IMAGES / f"{name}-{scheme}{end}.png", narrow if end else None)


def plan(folder: Path) -> None:
    """Show the memory of a Llama of 8 billion parameters over one step on eight H100."""
    (folder / "train.py").write_text(LARGE)
    options = "--mixed_precision bf16 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    shown(f"meshwright plan --gpus 8xH100 {options} --steps 20000 --html plan.html train.py", folder)
    complete = "document.readyState === 'complete' && document.querySelector('svg') !== null"  # it has no script
    _pictures_of_page(folder / "plan.html", folder, "plan", narrow="details", drawn=complete)


def report(folder: Path) -> None:
    """Show the page of three runs."""
    (folder / "train.py").write_text(LOGGED)
    shown(f"{sys.executable} train.py && meshwright report runs", folder)
    _pictures_of_page(folder / "runs" / "report.html", folder, "report")


def watch(folder: Path) -> None:
    """Show four ranks that train, of which one waits longer for its data."""
    (folder / "train.py").write_text(SLOW)
    training = "meshwright launch --cpu --num_processes 4 train.py & sleep 45"
    text = shown(f"{training}; timeout --foreground --signal INT 10 meshwright watch runs; kill %1; wait", folder)
    frame = text[text.rindex("baseline") :]  # the last one, which stays
    draw(frame.partition("meshwright launch")[0].rstrip(), "meshwright watch runs", IMAGES / "watch.svg", COLUMNS)


PICTURES = {"check": check, "verdict": verdict, "plan": plan, "report": report, "watch": watch}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "digits.py").write_text(DIGITS)
            PICTURES[name](Path(directory))
        print(f"drew {name}")
