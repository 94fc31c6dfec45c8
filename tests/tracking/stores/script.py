"""Train nothing, and log to the trackers named on the command line, each for real and offline."""

from __future__ import annotations

import enum
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from meshwright import Accelerator

STEPS = range(10, 210, 2)  # neither from 0 nor one after the other

# Offline or local where a client decides that by an argument; the others are told by their variables.
OPTIONS = {
    "aim": {"system_tracking_interval": None, "capture_terminal_logs": False},
    "clearml": {"auto_connect_frameworks": False, "auto_resource_monitoring": False, "auto_connect_streams": False},
    "comet_ml": {"online": False},
    "dvclive": {"dir": "dvclive", "save_dvc_exp": False, "dvcyaml": None},
    "mlflow": {"logging_dir": "mlflow"},
}


class Color(enum.Enum):
    """Any enum."""

    RED = "red"


@dataclass
class Model:
    """Any dataclass."""

    depth: int = 3
    path: Path = Path("weights/best.pt")


CONFIG = {
    "lr": 0.5,
    "layers": [1, 2, 3],
    "color": Color.RED,
    "model": Model(),
    "scale": torch.tensor(0.25),
    "nothing": None,
    "deep": {"er": {"est": True}},
}


def loss_at(step: int) -> float:
    """Return a number that float32 can hold, different at every step."""
    return 1 / 64 + step / 4


def main(names: list[str]) -> None:
    """Log a config, a hundred steps, images and tables where there are some, and directly to the clients."""
    accelerator = Accelerator(log_with=names, project_dir="runs")
    accelerator.init_trackers(
        "shapes", config=CONFIG, init_kwargs={name: options for name, options in OPTIONS.items() if name in names}
    )
    for step in STEPS:
        values = {"loss": torch.tensor(loss_at(step)), "train/rank": accelerator.process_index}
        if step == STEPS[0]:
            values["note"] = "it begins"
        accelerator.log(values, step=step)
        if step == STEPS[50]:
            images = np.stack([np.full((4, 5, 3), 60, np.uint8), np.full((4, 5, 3), 200, np.uint8)])
            for tracker in accelerator.trackers:
                if tracker.name in ("tensorboard", "wandb", "swanlab", "comet_ml"):
                    options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                    tracker.log_images({"shapes": images}, step=step, **options)
                if tracker.name in ("aim", "clearml"):
                    tracker.log_images({"shapes": images[0]}, step=step)
                if tracker.name in ("wandb", "clearml"):
                    tracker.log_table("scores", columns=["name", "score"], data=[["a", 1], ["b", 2]], step=step)
    clients = {}
    for name in names:
        client = accelerator.get_tracker(name, unwrap=True)
        clients[name] = type(client).__name__
        if name == "tensorboard":
            client.add_scalar("direct", 7, 300)
        elif name in ("wandb", "swanlab", "trackio"):
            client.log({"direct": 7}, step=300)
        elif name == "comet_ml":
            client.log_metric("direct", 7, step=300)
        elif name == "aim":
            client.track(7, name="direct", step=300)
        elif name == "clearml":
            client.get_logger().report_scalar("direct", "direct", 7, 300)
        elif name == "dvclive":
            client.step = 300
            client.log_metric("direct", 7)
    accelerator.end_training()
    Path(f"clients-{accelerator.process_index}.json").write_text(json.dumps(clients))


if __name__ == "__main__":
    main(sys.argv[1:])
