"""Prepared loaders that are also torchdata's `StatefulDataLoader`: their state has torchdata's form.

torchdata saves the state of the index iterator, and restores it before the next iteration. Our iterator puts the
position of the prepared loader there, so that a shuffled epoch resumes in its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from ..order.indices import IndexSource
from ..order.position import Position, PositionError
from .base import PreparedLoader, generator_restored
from .streams import IterableDatasetShard

L = TypeVar("L", bound=PreparedLoader)
_STATEFUL: dict[type, Any] = {}  # a class of prepared loaders -> its stateful subclass


class StatefulIndices:
    """An iterator over the indices of a loader that tracks its position."""

    def __init__(self, loader: StatefulLoader, indices: Iterator[Any]) -> None:
        self._loader = loader
        self._indices = indices
        self._epoch = loader.iteration
        self._first: int | None = None
        """The base batches before the first one drawn; None for the loader's own start."""
        self._drawn = 0
        self._samples = 0

    def __iter__(self) -> StatefulIndices:
        return self

    def __next__(self) -> Any:
        drawn = next(self._indices)
        self._drawn += 1
        self._samples += len(drawn) if isinstance(drawn, Sized) else 1
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples that this process drew in the epoch, and the position."""
        loader = self._loader
        first = loader._start if self._first is None else self._first
        if isinstance(loader.dataset, IterableDataset):
            first = 0  # the batches before the start were drawn and dropped
        before = loader.reads_of_batches(first) * loader.samples_per_read
        position = loader.position_at(self._epoch, first + loader.batches_of_reads(self._drawn))
        return {"samples_yielded": before + self._samples, "position": position.to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start at a saved position, if nothing was drawn yet."""
        position = self._loader.position_in(state_dict)
        if position is not None:
            self._first = position.batches_of(self._loader.base_batch_size)
            self._loader.seek(self._first)


class StatefulIndexSource(IndexSource):
    """An index source whose iterators torchdata can save."""

    def __init__(self, loader: StatefulLoader, samples: Any) -> None:
        super().__init__(samples, loader.order_state)
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return StatefulIndices(self.loader, super().__iter__())


class StatefulLoader(PreparedLoader):
    """Overrides of a prepared loader whose base is torchdata's loader."""

    is_stateful = True
    torchdata: Any
    """torchdata's class, which follows the prepared classes in the MRO."""
    _loaded: dict[str, Any] | None = None
    """The state that the next iteration resumes from."""
    _state_before_prefetch: dict[str, Any] | None = None

    def _new_index_source(self, samples: Any) -> IndexSource:
        return StatefulIndexSource(self, samples)

    def state_dict(self) -> dict[str, Any]:
        """Return torchdata's state as of the batches yielded; empty before the first iteration."""
        if self._loaded is not None:
            return self._loaded
        in_epoch = self.is_mid_epoch
        if self._iterator is None:  # nothing was read yet, or the main process reads for this one
            begun = self._is_in_epoch or self.iteration > 0
            position = self.position_at(self.iteration - (not self._is_in_epoch), self.cursor.batches)
            own = {"_sampler_iter_state": {"position": position.to_dict()}, "_iterator_finished": not in_epoch}
            return own if begun else {}
        if in_epoch:
            return self._state_before_prefetch or self._state_now()
        return {**self._state_now(), "_iterator_finished": True}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the next iteration from torchdata's state, of this loader or of another `StatefulDataLoader`."""
        self._loaded = self._resume = None
        self.torchdata.load_state_dict(self, {})
        if not state_dict:
            return
        position = self._position_of(state_dict)
        if state_dict.get("_iterator_finished"):
            self._resume = Position(epoch=position.epoch + 1, begun=False)
        else:
            self._require_same_world_size(position)
            self._resume = position
            # torchdata counts the batches of a stream twice when it reads on to a state: a second resume loses some.
            if _is_torchdatas(state_dict) and not isinstance(self.dataset, IterableDataset):
                self.torchdata.load_state_dict(self, state_dict)
        self._loaded = state_dict
        self.iteration = self._resume.epoch

    def rewind(self) -> None:
        """Do nothing: torchdata's loader stays at a loaded position."""

    def position_at(self, epoch: int, batches: int) -> Position:
        """Return the position in an epoch after this many base batches."""
        return Position(
            epoch=epoch,
            batches=batches,
            batch_size=self.base_batch_size,
            order={} if isinstance(self.dataset, IterableDataset) else self.order_state.key(),
            num_processes=self.num_processes,
        )

    def position_in(self, indices_state: dict[str, Any] | None) -> Position | None:
        """Return the position that our index iterator saved in torchdata's state; None in states of other loaders."""
        found = (indices_state or {}).get("position")
        return None if found is None else Position.from_dict(found)

    def seek(self, batches: int) -> None:
        """Start the next indices after this many base batches."""
        if not isinstance(self.dataset, IterableDataset):
            self.index_source.start = self._index_start(batches)

    def _position_of(self, state: dict[str, Any]) -> Position:
        main = state.get("_snapshot", {}).get("_main_snapshot", state)  # nested if there are workers
        position = self.position_in(main.get("_sampler_iter_state"))
        if position is None:
            position = Position(
                epoch=self.iteration,
                batches=self.batches_of_reads(main["_sampler_iter_yielded"]),
                batch_size=self.base_batch_size,
                num_processes=self.num_processes,
            )
        since = self.batches_of_reads(state.get("_steps_since_snapshot", 0))
        return replace(position, batches=position.batches + since)

    def _require_same_world_size(self, position: Position) -> None:
        super()._require_same_world_size(position)
        if isinstance(self.dataset, IterableDataset) and position.num_processes != self.num_processes:
            raise PositionError(
                f"torchdata counts the batches that one process read of an iterable data set, so this state holds for "
                f"{position.num_processes} processes and this run has {self.num_processes}: resume on that many, or "
                "leave out use_stateful_dataloader."
            )

    def _state_now(self) -> dict[str, Any]:
        state: dict[str, Any] = self.torchdata.state_dict(self)
        return state

    def _snapshot_state(self) -> None:
        self._state_before_prefetch = self._state_now()

    def _rounds(self, resume: Position | None) -> Iterator[Any]:
        self._loaded, self._state_before_prefetch = None, None
        return super()._rounds(resume)

    def _open(self, resume: Position | None) -> Iterator[Any]:
        if not isinstance(self.dataset, IterableDataset):
            return super()._open(resume)
        if isinstance(self.dataset, IterableDatasetShard):
            self.dataset.begin(keep_states=False)
        with generator_restored() if resume is not None and resume.begun else nullcontext():
            return self._fast_forward(self.torchdata.__iter__(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the class without torchdata; unpickling makes the stateful class again."""
        return _new_instance, (type(self).__mro__[2],), self.__getstate__()


def _is_torchdatas(state: dict[str, Any]) -> bool:
    """Return whether torchdata made a state; ranks that receive their data have only a position."""
    return "_num_yielded" in state or "_snapshot" in state


def stateful_class(loader_class: type[L]) -> type[L]:
    """Return a subclass of a prepared loader class that is based on torchdata's `StatefulDataLoader`."""
    if issubclass(loader_class, StatefulLoader):
        return loader_class
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ImportError(
            "use_stateful_dataloader=True needs torchdata: pip install torchdata. Without it, prepared loaders keep "
            "their position by themselves."
        ) from error
    if loader_class not in _STATEFUL:
        attributes = {name: getattr(loader_class, name) for name in ("__module__", "__doc__")}
        bases = (StatefulLoader, loader_class, StatefulDataLoader)
        _STATEFUL[loader_class] = type(loader_class.__name__, bases, {**attributes, "torchdata": StatefulDataLoader})
    found: type[L] = _STATEFUL[loader_class]
    return found


def _new_instance(loader_class: type[PreparedLoader]) -> Any:
    stateful = stateful_class(loader_class)
    return stateful.__new__(stateful)
