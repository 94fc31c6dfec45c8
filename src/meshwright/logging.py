"""A logger that logs once per run instead of once per process."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .config.environment import read_setting
from .runtime.group.runtime import Runtime, rank_of_this_process

_CALLER = 2
"""The `stacklevel` of the line that logs, as published: one more than the logging module counts."""

if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    _LoggerAdapter = logging.LoggerAdapter  # takes no parameter before Python 3.11


class MultiProcessAdapter(_LoggerAdapter):
    """A logger whose calls take `main_process_only` (default True) and `in_order`, which implies every process.

    It also works before any state exists: the rank is then read from the launcher's variables.
    """

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Prefix the message with the rank."""
        return f"[RANK {rank_of_this_process()}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the main process, on every process (`main_process_only=False`), or rank by rank (`in_order=True`)."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = max(kwargs.get("stacklevel", _CALLER) - 1, 1) + 2  # this function and the next
        runtime = Runtime.existing()
        if in_order and runtime is not None:
            for rank in range(runtime.num_processes):
                if rank == runtime.process_index:
                    self._emit(level, msg, *args, **kwargs)
                runtime.barrier()
        elif in_order or not main_process_only or rank_of_this_process() == 0:
            self._emit(level, msg, *args, **kwargs)

    def _emit(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            message, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
            self.logger.log(level, message, *args, **kwargs)

    @lru_cache(None)  # noqa: B019  one adapter per logger lives as long as the process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, but only the first time with these arguments."""
        self.log(logging.WARNING, *args, **kwargs | {"stacklevel": kwargs.get("stacklevel", _CALLER) + 1})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger for a training script.

    The level is `log_level`, or the environment's `ACCELERATE_LOG_LEVEL`, or what the logging module was set to.
    """
    logger = logging.getLogger(name)
    level = log_level or read_setting("log_level")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
