"""HSDP under `--survive`, whose processes die while they write shards: `sharded_saving.py FOLDER`.

Rank 3 dies in the first checkpoint, and rank 0, which commits, in the second one. The survivors write what they find in
the checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from meshwright import Accelerator, ParallelismConfig
from meshwright.checkpoint.parts import shards

folder, rank, is_first = Path(sys.argv[1]), int(os.environ["RANK"]), os.environ["MESHWRIGHT_INCARNATION"] == "0"
write_tensors = shards.write_tensors


class Count:
    """How many checkpoints were made; a replacement takes it from the others."""

    made = 0

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


count = Count()


def write_or_die(*args: Any) -> None:
    if is_first and (rank, count.made) in ((3, 0), (0, 1)):
        os.kill(os.getpid(), signal.SIGKILL)
    write_tensors(*args)


shards.write_tensors = write_or_die
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
model = torch.nn.Linear(6, 4)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(16_000, 6))
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(count)
accelerator.resume()

for (inputs,) in loader:
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    is_whole = accelerator.num_processes == 4
    if accelerator.reduce(torch.tensor(int(optimizer.steps_taken % 5 == 0 and is_whole)), "min"):
        before = [param.full_tensor() for param in model.parameters()]
        path = accelerator.save_state(str(folder / f"checkpoint_{optimizer.steps_taken}"))
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        accelerator.load_state(path)
        after = [param.full_tensor() for param in model.parameters()]
        is_equal = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        here = {"step": optimizer.steps_taken, "processes": accelerator.num_processes, "is_equal": is_equal}
        (folder / f"found_{rank}_{count.made}").write_text(json.dumps(here))
        count.made += 1
    if count.made == 3:
        break
    time.sleep(0.05)
