"""Write what users keep in pickles, or read it: `keeps.py write FOLDER`, `keeps.py read FOLDER`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch


def write(folder: Path) -> None:
    """Leave a file for every kind of object."""
    from transformers import Trainer, TrainingArguments
    from trl import SFTConfig

    from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import (
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ProfileKwargs,
        ProjectConfiguration,
        RNGType,
        TorchDynamoPlugin,
    )

    Trainer(torch.nn.Linear(2, 2), TrainingArguments(str(folder / "trainer"), use_cpu=True)).save_model()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    kept = {
        "trl": SFTConfig(str(folder / "trl"), use_cpu=True, bf16=False),
        "states": [PartialState(), AcceleratorState(), GradientState(), accelerator.distributed_type],
        "settings": [
            DataLoaderConfiguration(),
            DistributedDataParallelKwargs(),
            FullyShardedDataParallelPlugin(),
            GradientAccumulationPlugin(num_steps=2),
            ProfileKwargs(),
            ProjectConfiguration("x"),
            RNGType.TORCH,
            TorchDynamoPlugin(),
        ],
        "optimizer": optimizer,
        "model": model,
    }
    for name, value in kept.items():
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(value))


def read(folder: Path) -> None:
    """Load every file, and say the modules of what is in it."""
    loaded: dict[str, Any] = {file.stem: pickle.loads(file.read_bytes()) for file in sorted(folder.glob("*.pkl"))}
    loaded["trainer"] = torch.load(folder / "trainer" / "training_args.bin", weights_only=False)
    assert loaded["trainer"].device == loaded["trl"].device == torch.device("cpu")
    assert loaded["states"][0].num_processes == 1
    assert loaded["settings"][3].num_steps == 2
    assert len(loaded["optimizer"].state_dict()["state"]) == 2
    print(sorted(loaded))


if __name__ == "__main__":
    if sys.argv[1] == "read without meshwright":
        sys.modules["meshwright"] = None  # type: ignore[assignment]  # importing it is an error
    {"write": write}.get(sys.argv[1], read)(Path(sys.argv[2]))
