"""What the elastic test launches: count steps in a shared file until a file says that it is enough."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from meshwright import Accelerator

accelerator = Accelerator(cpu=True)
progress = Path("progress")
step = int(progress.read_text().split()[0]) if progress.exists() else 0
step = int(accelerator.reduce(torch.tensor([step * accelerator.is_main_process])).item())
while True:
    here, enough = accelerator.reduce(torch.tensor([1, Path("enough").exists()])).tolist()
    step += 1
    if accelerator.is_main_process:
        Path("progress.new").write_text(f"{step} {here}")
        os.replace("progress.new", progress)
    if enough:
        break
    time.sleep(0.1)
print(f"rank {accelerator.process_index} of {accelerator.num_processes} ended at step {step}")
