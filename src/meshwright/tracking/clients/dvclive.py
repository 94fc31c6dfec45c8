"""DVCLive."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..general import GeneralTracker, on_main_process
from ..values import is_number, plain, warn_dropped

logger = logging.getLogger(__name__)


class DVCLiveTracker(GeneralTracker):
    """Log to a `dvclive.Live`: the given one, or a new one with the given options; `run_name` is not used."""

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs = kwargs
        self._is_given = live is not None

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Open the files, unless a `Live` was given."""
        from dvclive import Live

        if not self._is_given:
            options = {**self.continued, **self.init_kwargs}
            if self.continued and options["resume"]:
                _remove_rows_from(Path(options["dir"]), self.next_step)
            self.live = Live(**options)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config as parameters."""
        self.live.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text as metrics, a dictionary as `name/key`; options are those of `Live.log_metric`."""
        if step is not None:
            self.live.step = step
        self._log(values, kwargs)
        self.live.next_step()

    def _log(self, values: dict[str, Any], options: dict[str, Any]) -> None:
        for name, value in values.items():
            if is_number(value) or isinstance(value, str):
                self.live.log_metric(name, value, **options)
            elif isinstance(value, dict):
                self._log({f"{name}/{key}": item for key, item in value.items()}, options)
            else:
                warn_dropped("dvclive", name, type(value).__name__)

    def run_identity(self) -> dict[str, Any]:
        """Return the options with which `Live` continues in its folder instead of clearing it."""
        return {} if self._is_given else {"dir": self.live.dir, "resume": True}

    @on_main_process
    def finish(self) -> None:
        """Write the remaining data, and the DVC experiment if requested."""
        self.live.end()


def _remove_rows_from(folder: Path, next_step: int) -> None:
    """Remove the rows of steps that the resumed run repeats: DVCLive would keep both."""
    removed = 0
    for table in folder.glob("plots/metrics/**/*.tsv"):
        head, *rows = table.read_text(encoding="utf-8").splitlines(keepends=True)
        column = head.rstrip("\n").split("\t").index("step")
        kept = [row for row in rows if int(row.split("\t")[column]) < next_step]
        table.write_text("".join([head, *kept]), encoding="utf-8")
        removed += len(rows) - len(kept)
    if removed:
        logger.warning("Removed %d rows from the step %d on in %s: the resumed run does these steps again.",
                       removed, next_step, folder)  # fmt: skip
