"""The position of the training loop in its accumulation window and data loader."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from ...config.plugins.handlers import GradientAccumulationPlugin
from ...instruments import PROCESS, Instruments


class ActiveLoader(Protocol):
    """The attributes that the gradient state reads of a data loader that is being iterated."""

    end_of_dataloader: bool
    remainder: int


def _no_loader() -> None:
    """Return None, in place of a weak reference to a loader."""


class GradientState:
    """The accumulation state of one Accelerator.

    `GradientState()` returns the state of the newest Accelerator, so that code far from it can read
    `GradientState().sync_gradients`; with a plugin as argument it creates a new state.
    """

    _current: ClassVar[GradientState | None] = None

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    is_xla_gradients_synced: bool
    """Whether gradients on XLA devices were averaged already, for clipping, so that the step does not do it again."""

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        """Return the current state, or a new one for a plugin."""
        if gradient_accumulation_plugin is None and cls._current is not None:
            return cls._current
        state = super().__new__(cls)
        plugin = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=1)
        state.sync_gradients = True
        state.plugin_kwargs = plugin.to_kwargs()
        state.is_xla_gradients_synced = False
        state._loaders = [_no_loader]
        cls._current = state
        return state

    instruments: Instruments = PROCESS
    """What sees the loop; see `instruments.py`."""
    _loaders: list[Callable[[], Any]]  # weak references, outermost first; a dead one removes itself

    def __getstate__(self) -> dict[str, Any]:
        """Return what does not belong to this process, by the published names."""
        return {
            "sync_gradients": self.sync_gradients,
            "plugin_kwargs": self.plugin_kwargs,
            "_is_xla_gradients_synced": self.is_xla_gradients_synced,
            "_dataloader_references_ref": [None],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without a loader."""
        self.sync_gradients = state["sync_gradients"]
        self.plugin_kwargs = state["plugin_kwargs"]
        self.is_xla_gradients_synced = state["_is_xla_gradients_synced"]
        self._loaders = [_no_loader]

    @classmethod
    def _reset_state(cls) -> None:
        """Drop the current state; the next `GradientState()` creates a new one."""
        cls._current = None

    @property
    def initialized(self) -> bool:
        """Return whether this is a live state."""
        return self._current is not None

    @property
    def num_steps(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        num_steps: int = self.plugin_kwargs.get("num_steps", 1)
        return num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Return the published flag; as in accelerate 1.x, a scheduler's step count is never adjusted by it."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Return whether the end of a data loader closes the accumulation window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Return whether gradients are reduced on every micro-batch (less memory, more traffic)."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def active_dataloader(self) -> Any:
        """Return the loader that yielded a batch last and is still being iterated, or None."""
        return self._loaders[-1]()

    @property
    def dataloader_references(self) -> list[Any]:
        """Return the loaders being iterated, outermost first, behind a leading None as published."""
        return [loader() for loader in self._loaders]

    @property
    def in_dataloader(self) -> bool:
        """Return whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the active loader has yielded its last batch."""
        loader = self._loaders[-1]()
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Return how many samples of the last global batch are real, or -1 where that is not known."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, loader: ActiveLoader) -> None:
        self._loaders.append(weakref.ref(loader, self._loaders.remove))

    def _activate_dataloader(self, loader: ActiveLoader) -> None:
        """Make the loader that yields a batch the active one; with one loader there is nothing to do."""
        if len(self._loaders) > 2 and self._loaders[-1]() is not loader:
            self._remove_dataloader(loader)
            self._add_dataloader(loader)

    def is_outermost(self, loader: ActiveLoader) -> bool:
        """Return whether the loop over a loader is inside of no loop over another one."""
        return self._loaders[1]() is loader

    def _remove_dataloader(self, loader: ActiveLoader) -> None:
        self._loaders[1:] = [other for other in self._loaders[1:] if other() is not loader]

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, "
            f"remainder={self.remainder}, plugin_kwargs={self.plugin_kwargs})"
        )
