"""What each tracker leaves on the disk when it runs without a network, and how to read it back."""

from __future__ import annotations

from pathlib import Path

PACKAGES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


def offline(directory: Path) -> dict[str, str]:
    """Return the clients' own variables that keep each of them offline and in this directory."""
    # [Note: ClearML's process]
    # On Linux ClearML forks a process for its reports while a thread of its own starts git. The fork can inherit the
    # pipe that this thread reads, and then closing a task waits until the process ends: for ever, or half a minute.
    # It also parses every Python file of the checkout, environments included, unless it asks pip what is installed.
    settings = directory / "clearml.conf"
    settings.write_text("sdk { development { report_use_subprocess: false, detect_with_pip_freeze: true } }\n")
    return {
        "HOME": str(directory / "home"),
        "CLEARML_CACHE_DIR": str(directory / "clearml"),
        "CLEARML_CONFIG_FILE": str(settings),
        "CLEARML_OFFLINE_MODE": "1",
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_OFFLINE_DIRECTORY": str(directory / "comet"),
        "COMET_START_ONLINE": "0",
        "DO_NOT_TRACK": "1",
        "DVC_NO_ANALYTICS": "1",
        "GRADIO_ANALYTICS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "SWANLAB_LOG_DIR": str(directory / "swanlog"),
        "SWANLAB_MODE": "offline",
        "SWANLAB_SAVE_DIR": str(directory / "swanlab_home"),
        "TRACKIO_DIR": str(directory / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
