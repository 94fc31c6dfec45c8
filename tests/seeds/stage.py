"""The stage on which a document's code runs as `__main__`, its text untouched.

    python stage.py SETTING SCRIPT      (or torchrun ... stage.py SETTING SCRIPT)

The stage brings what the documents take for granted and this machine does not have:

- torchvision's MNIST and CIFAR10 are downloads of many megabytes: two data sets with the same names and arguments are
  put in their place, of few small images made on the spot. The transforms stay torchvision's own.
- torchvision's wheel has compiled operators for another build of torch: the two that it needs to be importable are
  declared.
- Names that a document uses and never defines (`model`, `train_dataloader`, `loss_function`, ...) come from SETTING.

When the script has ended, every rank leaves `report-<rank>.pt` in the current directory: the numbers, the weights and
the losses with which the script came to its end.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, TensorDataset

# --- the names that documents leave undefined -------------------------------------------------------------------------

FEATURES, CLASSES = 12, 4
NUM_SAMPLES = 78  # with batches of 4 neither one process nor two come out even
BATCH_SIZE = 4
NUM_EPOCHS = 5


class RecordedLoss(nn.CrossEntropyLoss):
    """A loss function that remembers what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.record: list[float] = []

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss."""
        loss = super().forward(input, target)
        self.record.append(loss.item())
        return loss


class NamedSamples(Dataset[dict[str, Tensor]]):
    """The same samples as dicts, which one of the snippets expects."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        features, label = self.samples[index]
        return {"input": features, "target": label}


class AnotherNameOf:
    """Stands for whatever the script's variable of this name is when it is used: the prepared object, by then."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _meant(self) -> Any:
        return vars(sys.modules["__main__"])[self.name]

    def __iter__(self) -> Any:
        return iter(self._meant())

    def step(self) -> None:
        """Step a scheduler."""
        self._meant().step()


def samples() -> TensorDataset:
    """Return a problem that a small network learns in seconds."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
    return TensorDataset(features, (features @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1))


def pairs() -> dict[str, Any]:
    """Name everything a training loop needs; batches are pairs of inputs and targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.97),
        "train_dataloader": DataLoader(samples(), batch_size=BATCH_SIZE),
        "eval_dataloader": DataLoader(samples(), batch_size=BATCH_SIZE),
        "loss_function": RecordedLoss(),
        "num_epochs": NUM_EPOCHS,
    }


def dicts() -> dict[str, Any]:
    """Name the same; batches are dicts."""
    return pairs() | {"train_dataloader": DataLoader(NamedSamples(samples()), batch_size=BATCH_SIZE)}


def literal_names() -> dict[str, Any]:
    """Bring the names that 002 uses beside those it prepares, as the plain objects they would be."""
    names = pairs()
    return names | {"training_dataloader": names["train_dataloader"], "scheduler": names["lr_scheduler"]}


def meant_names() -> dict[str, Any]:
    """Bring the names that 002 uses beside those it prepares, as other names of the prepared objects."""
    return pairs() | {
        "training_dataloader": AnotherNameOf("train_dataloader"),
        "scheduler": AnotherNameOf("lr_scheduler"),
    }


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "pairs": pairs,
    "dicts": dicts,
    "literal_names": literal_names,
    "meant_names": meant_names,
}

# --- torchvision ------------------------------------------------------------------------------------------------------


class Gratings(Dataset[Any]):
    """PIL images of ten classes: stripes at ten angles, in noise."""

    mode: str
    size: int
    num_train: int
    num_test: int

    def __init__(
        self, root: str, train: bool = True, transform: Callable[[Any], Any] | None = None, download: bool = False
    ) -> None:
        from PIL import Image

        generator = torch.Generator().manual_seed(int(train))
        rows, columns = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        self.transform = transform
        self.images = []
        for index in range(self.num_train if train else self.num_test):
            angle = torch.tensor(index % 10 * torch.pi / 10)
            phase = torch.rand((), generator=generator)
            stripes = torch.sin(rows * angle.sin() + columns * angle.cos() + phase)
            noise = torch.randn(self.size, self.size, generator=generator)
            pixels = (stripes * 80 + noise * 20 + 128).clamp(0, 255).to(torch.uint8)
            self.images.append((Image.fromarray(pixels.numpy()).convert(self.mode), index % 10))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image, label = self.images[index]
        return (image if self.transform is None else self.transform(image)), label


class MNIST(Gratings):
    """Few images in the format of MNIST: 001's network has 512 channels."""

    mode, size, num_train, num_test = "L", 28, 160, 62


class CIFAR10(Gratings):
    """Few images in the format of CIFAR-10: the backward pass of fp16 convolutions is slow on a CPU."""

    mode, size, num_train, num_test = "RGB", 32, 80, 80


def bring_torchvision() -> Any:
    """Make torchvision importable here, and its two data sets small. What is returned must be kept."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    torchvision.datasets.MNIST = MNIST
    torchvision.datasets.CIFAR10 = CIFAR10
    return library


# --- running ----------------------------------------------------------------------------------------------------------


class Observer:
    """Sees what the script does without touching it: optimizer steps, and the variables its last function left."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.optimizer_steps = 0
        self.last_function: dict[str, Any] = {}

    def on_step(self, *_: Any) -> None:
        """Count a step that an optimizer of torch really made."""
        self.optimizer_steps += 1

    def on_event(self, frame: Any, event: str, _: Any) -> None:
        """Keep the local variables of a function of the script that returns."""
        if event == "return" and frame.f_code.co_filename == self.script and frame.f_code.co_name != "<module>":
            self.last_function = dict(frame.f_locals)


def main(setting: str, script: str) -> None:
    """Run the script and leave the report."""
    library = bring_torchvision() if "torchvision" in Path(script).read_text(encoding="utf-8") else None
    torch.manual_seed(0)  # the scripts make their models before they seed, or never seed: luck must not decide
    observer = Observer(script)
    register_optimizer_step_post_hook(observer.on_step)
    sys.setprofile(observer.on_event)
    names = runpy.run_path(script, init_globals=SETTINGS[setting](), run_name="__main__")
    sys.setprofile(None)
    del library

    names |= {name: value for name, value in observer.last_function.items() if name not in names}
    model: Any = names["model"]
    report = {
        "numbers": {name: value for name, value in names.items() if type(value) in (int, float)},
        "weights": getattr(model, "module", model).state_dict(),
        "losses": names["loss_function"].record if "loss_function" in names else [],
        "optimizer_steps": observer.optimizer_steps,
    }
    torch.save(report, f"report-{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
