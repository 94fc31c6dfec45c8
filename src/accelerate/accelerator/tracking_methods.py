"""The methods of `Accelerator` that log to trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tracking.trackers import Trackers


class TrackingMethods:
    """The part of `Accelerator` that opens trackers and logs to them."""

    _trackers: Trackers | None

    @property
    def log_with(self) -> list[Any]:
        """Return the names and objects of the trackers that were asked for and can be used."""
        return [] if self._trackers is None else self._trackers.requested

    @property
    def trackers(self) -> list[Any]:
        """Return the tracker objects, once what was logged so far has reached them."""
        return [] if self._trackers is None else self._trackers.drained()

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Open a run in every tracker of `log_with` and store its config, whatever that is made of.

        Args:
            project_name: Name of the project in every tracker.
            config: Settings of the run, which every tracker stores.
            init_kwargs: Options of each tracker by its name: `{"wandb": {"entity": "my_team"}}`.
            strict: Whether the error of a tracker that fails later is raised. By default it is reported, the tracker
                is left out, and training goes on.
        """
        if self._trackers is not None:
            self._trackers.begin(project_name, config, init_kwargs or {}, strict=strict)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` its client's own object; other ranks get one that does nothing.

        Args:
            name: The tracker's name, such as "tensorboard".
            unwrap: Whether the client's own object is returned.
        """
        if self._trackers is None:
            raise ValueError(f"There is no tracker {name!r}: Accelerator(log_with={name!r}) asks for it.")
        return self._trackers.named(name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        reduce: str | None = None,
    ) -> None:
        """Log values to every tracker, and go on before they are written.

        Args:
            values: Numbers, tensors of one element, or whatever else the trackers take, by name.
            step: Number of the step; without it the trackers count.
            log_kwargs: Options of each tracker's own log function, by the tracker's name.
            reduce: "mean", "sum", "max" or "min": the values of all processes become one first, and every process must
                call `log` with the same names. Without it the values of the main process are logged.
        """
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs or {}, reduce)
