"""A run with one of everything that a checkpoint holds, all of it stamped with one number.

What was stamped with 3 and saved must come back as 3 in every part: a checkpoint that mixes two saves shows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright import Accelerator, ProjectConfiguration

FEATURES = 64


class Notes:
    """A registered object."""

    def __init__(self) -> None:
        self.stamp = 0

    def state_dict(self) -> dict[str, Any]:
        return {"stamp": self.stamp}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stamp = state["stamp"]


class StampedRun:
    """An Accelerator with a model, optimizer, scheduler, loader, scaler, generators and a registered object."""

    def __init__(self, folder: Path | str | None = None, *, project_options: dict[str, Any] | None = None) -> None:
        project = None
        if folder is not None:
            options = {"automatic_checkpoint_naming": True, "total_limit": 1} | (project_options or {})
            project = ProjectConfiguration(project_dir=str(folder), **options)
        self.accelerator = Accelerator(cpu=True, mixed_precision="fp16", project_config=project)
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(torch.zeros(200, 1), batch_size=1)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.notes = Notes()
        self.accelerator.register_for_checkpointing(self.notes)

    def stamp(self, number: int) -> None:
        """Bring every part into the state of this number."""
        own = self.accelerator.unwrap_model(self.model)
        with torch.no_grad():
            for tensor in own.state_dict().values():
                tensor.fill_(number)
        for param in own.parameters():
            self.optimizer.state[param]["momentum_buffer"] = torch.full_like(param, number)
        scheduler = self.scheduler.state_dict()
        self.scheduler.load_state_dict(scheduler | {"last_epoch": number})
        scaler: Any = self.accelerator.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": float(number)})
        self.loader.load_state_dict({"epoch": number, "batches": 0, "batch_size": 1})
        self.notes.stamp = number
        self.accelerator.step = number
        torch.manual_seed(self._seed(number))

    def _seed(self, number: int) -> int:
        return 100 * number + self.accelerator.process_index

    def stamps(self) -> dict[str, int | None]:
        """Return the number that each part says."""
        own = self.accelerator.unwrap_model(self.model)
        scaler: Any = self.accelerator.scaler
        here = torch.get_rng_state()
        seed = next(
            (number for number in range(20) if torch.equal(here, _state_of_seed(self._seed(number)))),
            None,
        )
        return {
            **{f"model {name}": _only(tensor) for name, tensor in own.state_dict().items()},
            **{
                f"optimizer {index}": _only(self.optimizer.state[param]["momentum_buffer"])
                for index, param in enumerate(own.parameters())
            },
            "scheduler": self.scheduler.state_dict()["last_epoch"],
            "scaler": int(scaler.state_dict()["scale"]),
            "loader": self.loader.state_dict()["epoch"],
            "registered": self.notes.stamp,
            "step": self.accelerator.step,
            "generator": seed,
        }

    def stamp_of_all(self, but: Sequence[str] = ()) -> int:
        """Return the one number that all parts say, but some."""
        stamps = {part: number for part, number in self.stamps().items() if part not in but}
        assert len(set(stamps.values())) == 1, f"parts of different saves: {stamps}"
        number = stamps["step"]
        assert number is not None
        return number


def _state_of_seed(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _only(tensor: torch.Tensor) -> int | None:
    values = tensor.unique().tolist()
    return int(values[0]) if len(values) == 1 else None
