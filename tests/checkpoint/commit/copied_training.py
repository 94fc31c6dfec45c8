"""A training script whose processes are killed: `copied_training.py FOLDER WAY EVENT`.

WAY is ddp, fsdp or hsdp. EVENT is what happens in the first attempt:
- `none`
- `kill:N`: all ranks kill themselves in the body of step N
- `kill:N:R:M`: first only rank R, in its first process; all others at step M
- `in_copy:N`: all ranks kill themselves while they write the copy of step N
- `lose:N:R`: as `kill:N`, and the copies of the machine of rank R are deleted
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.checkpoint.commit import copies

folder, way, (event, *numbers) = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(":")
STEPS = max(21, int(numbers[-1]) + 3 if numbers else 0)
rank = int(os.environ.get("RANK", "0"))
is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
random.seed(rank)
np.random.seed(rank)
torch.manual_seed(0)
torch.set_num_threads(1)

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    project_dir=folder,
    fsdp_plugin=None if way == "ddp" else FullyShardedDataParallelPlugin(fsdp_version=2),
    parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if way == "hsdp" else None,
)


class Counted:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


features = torch.randn(184, 16)
labels = (features @ torch.randn(16, 4)).argmax(1)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(33, 4), torch.nn.LayerNorm(4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
loader = DataLoader(TensorDataset(features, labels), batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
counted = Counted()
accelerator.register_for_checkpointing(counted)
torch.manual_seed(rank)
report = accelerator.resume()
if report:
    (folder / f"resumed_{rank}").write_text(str(report.step))

if is_first and event == "in_copy":
    save = copies._save

    def killed_while_saving(state: Any, path: Path) -> Any:
        if accelerator.checkpointer.copies._copied_at == int(numbers[0]) and path.name.startswith("state"):
            path.write_bytes(b"PK\3\4 half of a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return save(state, path)

    copies._save = killed_while_saving


def die(step: int) -> None:
    """Do what happens in the first attempt."""
    if not is_first or event not in ("kill", "lose"):
        return
    if event == "lose" and step == int(numbers[0]) and rank == int(numbers[1]):
        shutil.rmtree(os.environ["MESHWRIGHT_MEMORY_COPIES_DIR"])
    is_alone = event == "kill" and len(numbers) == 3
    if is_alone and step == int(numbers[0]) and rank == int(numbers[1]):
        is_due = os.environ["MESHWRIGHT_INCARNATION"] == "0"
    else:
        is_due = step == int(numbers[-1] if is_alone else numbers[0])
    if is_due:
        os.kill(os.getpid(), signal.SIGKILL)


while optimizer.steps_taken < STEPS:
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            noise = 0.01 * random.random() + 0.01 * np.random.rand()
            loss = torch.nn.functional.cross_entropy(model(inputs + noise), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        # A loss outside of a step ends a run whose replicas come and go.
        counted.total += 1 if accelerator.recovery is not None else float(accelerator.reduce(loss.detach()))
        if accelerator.sync_gradients:
            if optimizer.steps_taken == STEPS:
                break
            die(optimizer.steps_taken)
            if accelerator.recovery is not None and accelerator.num_processes == 1:
                time.sleep(0.3)  # until the replacement is there

end = {
    "parameters": [getattr(value, "_local_tensor", value) for value in model.state_dict().values()],
    "moments": [
        getattr(value, "_local_tensor", value) for of_one in optimizer.state.values() for value in of_one.values()
    ],
    "rates": scheduler.get_last_lr(),
    "counted": counted.total,
    "draws": [random.random(), np.random.rand(), torch.rand(3)],
}
torch.save(end, folder / f"end_{rank}")
accelerator.end_training()
