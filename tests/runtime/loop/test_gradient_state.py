"""Where the training loop is: the newest Accelerator's window and the innermost loader."""

from __future__ import annotations

import gc

import pytest

from meshwright.config.plugins.handlers import GradientAccumulationPlugin
from meshwright.runtime.loop.gradient_state import GradientState


class Loader:
    def __init__(self, end_of_dataloader: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end_of_dataloader
        self.remainder = remainder


def test_without_an_accelerator_every_step_synchronises() -> None:
    state = GradientState()
    assert state.sync_gradients
    assert (state.num_steps, state.sync_with_dataloader, state.sync_each_batch) == (1, True, False)
    assert not state.in_dataloader
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (None, False, -1)
    assert state.dataloader_references == [None]
    assert not state.is_xla_gradients_synced


def test_code_far_away_finds_the_newest_state() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=4))
    assert GradientState() is state
    newer = GradientState(GradientAccumulationPlugin(num_steps=2, sync_each_batch=True))
    assert GradientState() is newer
    assert (state.num_steps, newer.num_steps) == (4, 2), "the older Accelerator keeps its own"
    state._set_sync_gradients(False)
    assert (state.sync_gradients, newer.sync_gradients) == (False, True)


def test_the_plugin_is_kept_as_the_values_that_differ_from_the_defaults() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False, sync_each_batch=True)
    state = GradientState(plugin)
    assert state.plugin_kwargs == {"num_steps": 3, "sync_with_dataloader": False, "sync_each_batch": True}
    assert (state.num_steps, state.sync_with_dataloader, state.sync_each_batch) == (3, False, True)
    state.plugin_kwargs["num_steps"] = 5  # as libraries do
    assert state.num_steps == 5


def test_reset_forgets_the_newest_state() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=4))
    assert state.initialized
    GradientState._reset_state()
    assert not state.initialized
    assert GradientState() is not state
    assert GradientState().num_steps == 1


def test_the_innermost_loader_answers() -> None:
    state = GradientState()
    training, evaluation = Loader(remainder=3), Loader(end_of_dataloader=True, remainder=1)
    state._add_dataloader(training)
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (True, False, 3)
    state._add_dataloader(evaluation)
    assert state.active_dataloader is evaluation
    assert (state.end_of_dataloader, state.remainder) == (True, 1)
    assert state.dataloader_references == [None, training, evaluation]
    state._remove_dataloader(evaluation)
    assert state.active_dataloader is training
    training.end_of_dataloader = True
    assert state.end_of_dataloader
    state._remove_dataloader(training)
    assert not state.in_dataloader


def test_loaders_may_end_in_any_order() -> None:
    state = GradientState()
    first, second = Loader(), Loader()
    state._add_dataloader(first)
    state._add_dataloader(second)
    state._remove_dataloader(first)
    assert state.active_dataloader is second
    state._remove_dataloader(first)
    assert state.active_dataloader is second


def test_a_loader_that_is_gone_is_not_active() -> None:
    state = GradientState()
    kept = Loader(remainder=2)
    state._add_dataloader(kept)
    state._add_dataloader(Loader(remainder=9))
    gc.collect()
    assert state.active_dataloader is kept
    assert state.remainder == 2
    assert state.dataloader_references == [None, kept]


@pytest.mark.parametrize("sync", [True, False])
def test_it_prints_where_it_is(sync: bool) -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=2))
    state._set_sync_gradients(sync)
    assert f"sync_gradients={sync}" in repr(state)
    assert "'num_steps': 2" in repr(state)
