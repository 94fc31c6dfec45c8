"""Files written, what comes back from them, and who is asked meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ..registry import Observer, script
from .training import network, rows, weights


class Counter:
    """Something of the user's own with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def everything(accelerator: Any) -> tuple[Any, ...]:
    """Prepare one of each."""
    own = network()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
    return accelerator.prepare(own, optimizer, rows(16), StepLR(optimizer, 2, gamma=0.5))


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[float]:
    """Train an epoch and return its losses."""
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@script("one", "two")
def state_saved_and_loaded(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    counter = Counter()
    things = everything(accelerator)
    accelerator.register_for_checkpointing(counter)
    observe(before=train(accelerator, *things))
    counter.count = 4
    observe(returned=Path(accelerator.save_state("saved")).name)
    accelerator.wait_for_everyone()
    observe.files("saved")
    drawn = torch.rand(2)
    observe(after=train(accelerator, *things))
    counter.count = 9
    accelerator.load_state("saved")
    observe(again=train(accelerator, *things), count=counter.count, random=torch.equal(torch.rand(2), drawn))


@script("one", "two")
def state_saved_without_safetensors(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(network())
    accelerator.save_state("saved", safe_serialization=False)
    accelerator.wait_for_everyone()
    observe.files("saved")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state("saved")
    observe(weights=weights(model))


@script("one", "two")
def automatic_names_and_a_limit(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = accelerator.prepare(network())
    for value in range(4):
        with torch.no_grad():
            next(iter(model.parameters())).fill_(value)
        observe(returned=accelerator.save_state(), iteration=accelerator.project_configuration.iteration)
    accelerator.wait_for_everyone()
    observe(kept=sorted(path.name for path in Path("project/checkpoints").iterdir()))
    observe(save_iteration=accelerator.save_iteration)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(-1)
    accelerator.load_state()
    observe(newest=weights(model)[0][0])
    accelerator.load_state("project/checkpoints/checkpoint_2")
    observe(older=weights(model)[0][0])


@script("one", "two")
def a_name_that_is_taken(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    accelerator.prepare(network())
    if accelerator.is_main_process:
        Path("project/checkpoints/checkpoint_0").mkdir(parents=True)
    accelerator.wait_for_everyone()
    observe.raises("save", accelerator.save_state)


@script("one", "two")
def load_of_what_is_not_there(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.prepare(network())
    observe.raises("load", accelerator.load_state, "nothing-here")
    observe.raises("no folder", accelerator.load_state)
    observe.raises("no name", accelerator.save_state)


@script("one", "two")
def hooks_around_saving(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(network())

    def on_save(models: Any, weights: Any, folder: str) -> None:
        observe(saving=[len(models), len(weights), Path(folder).name, accelerator.process_index])
        if accelerator.is_main_process:
            Path(folder, "mine.json").write_text(json.dumps({"models": len(models)}))
        weights.clear()

    def on_load(models: Any, folder: str) -> None:
        observe(loading=[len(models), Path(folder).name, json.loads(Path(folder, "mine.json").read_text())])
        models.clear()

    saving = accelerator.register_save_state_pre_hook(on_save)
    loading = accelerator.register_load_state_pre_hook(on_load)
    accelerator.save_state("saved")
    accelerator.wait_for_everyone()
    observe.files("saved")
    accelerator.load_state("saved")
    saving.remove()
    loading.remove()
    accelerator.save_state("plain")
    accelerator.wait_for_everyone()
    observe(plain=Path("plain/model.safetensors").exists(), weights=weights(model))


@script("one", "two")
def model_saved_in_shards(observe: Observer) -> None:
    from safetensors.torch import load_file

    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
    accelerator.save_model(model, "whole")
    accelerator.save_model(model, "shards", max_shard_size="3KB")
    accelerator.save_model(model, "bins", max_shard_size="3KB", safe_serialization=False)
    accelerator.wait_for_everyone()
    for folder in ("whole", "shards", "bins"):
        observe.files(folder)
    index = json.loads(Path("shards/model.safetensors.index.json").read_text())
    observe(map=index["weight_map"], size=index["metadata"]["total_size"], keys=sorted(index))
    observe(tensors=sorted(load_file("whole/model.safetensors")))


@script("one", "two")
def tied_weights_saved_once(observe: Observer) -> None:
    from safetensors.torch import load_file

    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    own[1].weight = own[0].weight
    model = accelerator.prepare(own)
    accelerator.save_model(model, "tied")
    accelerator.wait_for_everyone()
    observe(tensors=sorted(load_file("tied/model.safetensors")))


@script("one", "two")
def save_anything(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.save({"a": torch.ones(2)}, "plain.bin")
    accelerator.save({"a": torch.ones(2)}, "safe.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    observe.files(".")
    observe(plain=torch.load("plain.bin"))


@script("one", "two")
def registering_what_has_no_state(observe: Observer) -> None:
    from accelerate import Accelerator

    observe.raises("object", Accelerator().register_for_checkpointing, object())


@script("one", "two")
def two_of_each_saved(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    first, second = network(), network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (first, second)]
    schedulers = [StepLR(optimizer, 1) for optimizer in optimizers]
    accelerator.prepare(first, second, *optimizers, *schedulers, rows(4), rows(8))
    accelerator.register_for_checkpointing(Counter(), Counter())
    accelerator.save_state("saved")
    accelerator.wait_for_everyone()
    observe.files("saved")


@script("one", "two")
def project_folders(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(project_dir="here")
    observe(project=accelerator.project_dir, logs=accelerator.logging_dir)
    project = ProjectConfiguration(project_dir="there", logging_dir="elsewhere")
    observe(logs=project.logging_dir, naming=project.automatic_checkpoint_naming, limit=project.total_limit)
    alone = ProjectConfiguration()
    observe(project=alone.project_dir, logs=alone.logging_dir)
    alone.set_directories("later")
    observe(project=alone.project_dir, logs=alone.logging_dir)
    observe(exists=[Path(name).exists() for name in ("here", "there", "elsewhere", "later")])
