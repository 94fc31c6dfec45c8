"""The method of `Accelerator` that finds a batch size."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...config.combinations import Feature, require_combination
from ...runtime.devices.memory import arguments_without_batch_size


class FittingMethods:
    """The part of `Accelerator` that finds a batch size that fits."""

    @property
    def features(self) -> dict[Feature, str]:
        """The features that are in use; see `Accelerator.features`."""
        raise NotImplementedError

    def fit_batch_size(
        self,
        starting_batch_size: int,
        *,
        global_batch_size: int | None = None,
        remember: bool | str | os.PathLike[str] = True,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a training function of `batch_size`: it gets the largest one that fits, and the global batch stays.

        Sizes are tried from the starting one down. `gradient_accumulation_steps` is set so that batch size x
        accumulation steps x processes stays what it is with the starting size. A try runs the function for two
        optimizer steps on every process, and is undone: random numbers, prepared objects, logs and checkpoints are as
        before. All processes take the size that fits on all of them. Then the function runs with it, once.

        The function makes its loaders with the size that it is given, and trains inside `accelerator.accumulate()`.
        Models and optimizers are made and prepared in it, or prepared before the call.

        Args:
            starting_batch_size: The largest size that is tried, as a loader takes it: per process and micro-batch.
            global_batch_size: Samples per optimizer step, of all processes. By default those that the starting size
                and the Accelerator's `gradient_accumulation_steps` give.
            remember: Whether the size is kept for the next start, and where: by default in `batch_sizes.json` beside
                the file of `meshwright config`. It is used if function, models, devices, number of processes, number
                format and torch's version are the same. False neither reads nor writes; deleting the file forgets.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            from .search import BatchSizeSearch

            refuse_arguments = arguments_without_batch_size(function, "fit_batch_size")
            require_combination({Feature.FIT_BATCH_SIZE: "fit_batch_size"} | self.features)

            @functools.wraps(function)
            def with_fitting_batch_size(*args: Any, **kwargs: Any) -> Any:
                refuse_arguments(args)
                place = remember if isinstance(remember, bool) else Path(remember)
                search = BatchSizeSearch(self, function, starting_batch_size, global_batch_size, place)
                with_fitting_batch_size.tries = search.tries  # type: ignore[attr-defined]
                return search.run(*args, **kwargs)

            return with_fitting_batch_size

        return decorate
