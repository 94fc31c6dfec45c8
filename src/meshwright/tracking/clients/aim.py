"""Aim."""

from __future__ import annotations

import os
from typing import Any

from ..general import GeneralTracker, on_main_process
from ..values import is_number, plain, warn_dropped


class AimTracker(GeneralTracker):
    """Log to the Aim repository in `logging_dir`; options are those of `aim.Run`."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The `aim.Run`."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        import aim

        os.makedirs(self.logging_dir, exist_ok=True)  # Aim creates its repository in it, but not the folder itself
        own = {"repo": os.fspath(self.logging_dir), "experiment": self.run_name}
        options = {**own, **self.continued, **self.init_kwargs}
        self.is_remote = str(options["repo"]).startswith("aim://")
        self.writer = aim.Run(**options)
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config."""
        self.writer["hparams"] = plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, text and Aim's own objects, a dictionary as `name/key`; options are those of `Run.track`."""
        import aim

        for name, value in values.items():
            parts = value if isinstance(value, list) and value else [value]
            if is_number(value):
                self.writer.track(float(value), name=name, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.track(aim.Text(value), name=name, step=step, **kwargs)
            elif isinstance(value, dict):
                self.log({f"{name}/{key}": item for key, item in value.items()}, step=step, **kwargs)
            elif all(type(part).__module__.startswith("aim.") for part in parts):
                self.writer.track(value, name=name, step=step, **kwargs)
            else:
                warn_dropped("aim", name, type(value).__name__)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images, or (image, caption); `kwargs` has options of `aim.Image` and of `Run.track` by name.

        They are called "aim_image" and "track".
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            known = aim.Image(image, **{"caption": caption, **options.get("aim_image", {})})
            self.writer.track(known, name=name, step=step, **options.get("track", {}))

    def run_identity(self) -> dict[str, Any]:
        """Return the options with which `aim.Run` reopens this run, even if a killed process holds its lock."""
        return {"run_hash": self.writer.hash, "force_resume": True}

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()
