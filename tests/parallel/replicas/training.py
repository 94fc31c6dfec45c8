"""A training script whose processes are killed: `training.py FOLDER STEPS MODE [SHARDS]`.

With SHARDS, FSDP shards every replica over so many processes.

Every process writes the numbers of the samples of every step that it makes, and at the end its parameters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, DataLoaderConfiguration, ParallelismConfig, ProjectConfiguration

SAMPLES, BATCH, PAUSE = 384, 32, 0.1
PAUSE_OF_THOSE_LEFT = 1.0  # so that the run does not end before a replacement has started, however slow the machine is
STEP_OF_FLIP = 12  # in mode "flip" the last rank has a wrong bit from then on; in mode "hang" it stands still
folder, num_steps, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
num_processes, shards = int(os.environ.get("WORLD_SIZE", "1")), int(sys.argv[4]) if len(sys.argv) > 4 else 1
name = f"{os.environ.get('RANK', '0')}_{os.environ.get('MESHWRIGHT_INCARNATION', '0')}"
on_devices = "SIMULATED_ACCELERATOR_RULES" in os.environ
if on_devices:
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.simulated_accelerator import register

    register()
    os.environ.pop("ACCELERATE_USE_CPU", None)  # the launcher does not know the device
is_last = name == f"{int(os.environ.get('WORLD_SIZE', '0')) - 1}_0"
(folder / f"pid_{name}").write_text(str(os.getpid()))
torch.manual_seed(0)
torch.set_num_threads(1)

accelerator = Accelerator(
    cpu=not on_devices,
    gradient_accumulation_steps=2 if mode == "items" else 1,
    dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=3),
    log_with="jsonl",
    project_config=ProjectConfiguration(logging_dir=str(folder / "runs")),
    parallelism_config=ParallelismConfig(dp_replicate_size=num_processes // shards, dp_shard_size=shards)
    if shards > 1
    else None,
)
accelerator.init_trackers("killed")
features = torch.randn(SAMPLES, 16)
labels = (features @ torch.randn(16, 4)).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
loader = DataLoader(
    TensorDataset(features, labels, torch.arange(SAMPLES)),
    batch_size=BATCH,
    shuffle=True,
    num_workers=1 if mode == "items" and "RANK" in os.environ else 0,
)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
examined = DataLoader(TensorDataset(features[:100], torch.arange(100)), batch_size=BATCH)
if mode == "examine":
    examined = accelerator.prepare(examined)
if "RANK" in os.environ:
    accelerator.resume()

ids: list[int] = []
scores: list[object] = []


def examine() -> None:
    """Evaluate, and record which samples every process was told of; save a checkpoint."""
    seen: list[int] = []
    for inputs, numbers in examined:
        with torch.no_grad():
            outputs = model(inputs).argmax(1)
        told, _ = accelerator.gather_for_metrics((numbers, outputs))
        seen += told.tolist()
        time.sleep(PAUSE / 4)
    accelerator.wait_for_everyone()
    path = accelerator.save_state(str(folder / f"checkpoint_{optimizer.steps_taken}"))
    scores.append({"step": optimizer.steps_taken, "seen": sorted(seen), "saved": os.path.isdir(path)})
    with open(folder / f"scores_{name}", "a") as file:
        file.write(json.dumps(scores[-1]) + "\n")


with open(folder / f"samples_{name}", "w", buffering=1) as record:
    epoch = loader.iteration
    while optimizer.steps_taken < num_steps:
        for inputs, targets, numbers in loader:
            with accelerator.accumulate(model):
                if mode == "zero_first":
                    optimizer.zero_grad()
                if accelerator.recovery is None or loader.weight:
                    ids.extend(numbers.tolist())
                if mode == "items":
                    accelerator.backward(cross_entropy(model(inputs), targets, reduction="sum"), num_items=len(targets))
                else:
                    accelerator.backward(cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                if mode != "zero_first":
                    optimizer.zero_grad()
            if mode == "flip" and optimizer.steps_taken == STEP_OF_FLIP and is_last:
                model[0].weight.data.view(torch.int32)[0, 0] ^= 1 << 6  # the next update would round a lower bit away
            if mode == "hang" and optimizer.steps_taken == STEP_OF_FLIP and is_last:
                time.sleep(600)
            if accelerator.sync_gradients:
                accelerator.log({"samples": len(ids)}, step=optimizer.steps_taken)
                record.write(json.dumps({"epoch": epoch, "ids": ids}) + "\n")
                ids.clear()
                if accelerator.recovery is not None:
                    member = accelerator.recovery.member
                    time.sleep(PAUSE if len(member.members) == member.replicas else PAUSE_OF_THOSE_LEFT)
                if mode == "examine":
                    accelerator.gather(torch.tensor(float(len(numbers))))
                    if optimizer.steps_taken % 5 == 0:
                        examine()
        epoch += 1

parameters = [param.full_tensor() if shards > 1 else param for param in model.parameters()]
end = {"parameters": torch.nn.utils.parameters_to_vector(parameters).detach().cpu(), "lr": scheduler.get_last_lr()}
torch.save(end, folder / f"end_{name}")
accelerator.end_training()
