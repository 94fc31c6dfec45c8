"""Every sample once, on any number of processes, from any position: checked over the whole space."""

from __future__ import annotations

import pickle
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from meshwright import Accelerator, DataLoaderConfiguration, skip_first_batches
from tests.data.worlds import Data, Step, steps_of
from tests.ranks import run_on_ranks
from tests.sizes import at_night, sized

EXAMPLES = sized(gate=100, nightly=20_000)
BOUNDED = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # streams are read on, ranks may be uneven

WORLDS = st.integers(1, 8)
STREAMS = ("stream", "stateful stream", "stream of batches")
KINDS = st.sampled_from(["map", "map", "map", "sampler of batches", "opaque", *STREAMS])


@st.composite
def data(draw: st.DrawFn, **fixed: object) -> Data:
    """Draw a loader and how it is sharded."""
    kind = fixed.get("kind", draw(KINDS))
    chosen = {
        "n": draw(st.integers(0, 200)),
        "batch_size": draw(st.integers(1, 12)),
        "shuffle": draw(st.booleans()) and kind in ("map", "sampler of batches"),
        "drop_last": draw(st.booleans()),
        "even_batches": draw(st.booleans()) or kind in STREAMS,
        "split_batches": draw(st.booleans()),
        "kind": kind,
        "seedable": draw(st.booleans()),
        "huge": draw(st.booleans()),
    }
    if kind == "stream of batches":  # nobody but the data set decides about its batches
        chosen |= {"drop_last": False, "split_batches": False}
    chosen |= fixed
    # torch itself refuses to shuffle no samples
    chosen["shuffle"] = chosen["shuffle"] and chosen["n"] > 0
    return Data(**chosen)  # type: ignore[arg-type]


def order_of(case: Data) -> list[int]:
    """The order in which one process that drops nothing would see the samples."""
    whole = Data(**{**case.__dict__, "drop_last": False, "split_batches": False, "workers": 0})
    return list(chain(*(step.real for step in steps_of(whole.world(1)))))


def usable(case: Data, world_size: int) -> bool:
    return not case.split_batches or case.batch_size % world_size == 0


def real_samples(steps: list[Step]) -> list[int]:
    return list(chain(*(step.real for step in steps)))


def expected_samples(case: Data, world_size: int) -> list[int]:
    order = order_of(case)
    if not case.drop_last:
        return order
    global_batch = case.batch_size if case.split_batches else case.batch_size * world_size
    return order[: case.n - case.n % global_batch]


@BOUNDED
@given(case=data(), world_size=WORLDS)
def test_metrics_see_exactly_the_data_set_in_order(case: Data, world_size: int) -> None:
    assume(usable(case, world_size))
    world = case.world(world_size)
    steps = steps_of(world)
    assert sorted(order_of(case)) == list(range(case.n))
    assert real_samples(steps) == expected_samples(case, world_size)
    if (case.even_batches or case.drop_last) and case.kind != "stream of batches":
        share = world[0].total_batch_size // world_size
        full = steps if world_size > 1 or case.drop_last else steps[:-1]
        assert all(len(batch) == share for step in full for batch in step.batches), "equal steps on all ranks"
    if case.kind not in STREAMS:
        assert [len(loader) for loader in world] == [
            sum(bool(step.batches[rank]) for step in steps) for rank in range(world_size)
        ]
    declared = world[0].plan().padding
    if declared is not None and world_size > 1:
        handed_out = sum(len(batch) for step in steps for batch in step.batches)
        assert handed_out == len(real_samples(steps)) + declared


@BOUNDED
@given(
    case=data(drop_last=False, even_batches=True),
    worlds=st.lists(WORLDS, min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 12), min_size=3, max_size=3),
)
def test_a_position_holds_on_any_other_number_of_processes(case: Data, worlds: list[int], stops: list[int]) -> None:
    assume(all(usable(case, size) for size in worlds))
    seen: list[int] = []
    state = None
    for index, size in enumerate(worlds):
        world = case.world(size)
        if state is not None:
            for loader in world:
                loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        is_last = index == len(worlds) - 1
        # Epoch 0 is drawn from seed 0; whoever resumes has other random numbers, which must not matter.
        seed = 0 if state is None else index
        steps = steps_of(world, limit=None if is_last else stops[index], seed=seed)
        seen += real_samples(steps)
        if steps:
            states = steps[-1].states
            assert all(str(other) == str(states[0]) for other in states), "the same on every rank"
            state = states[0]
        if not is_last and state is not None and state["epoch"] == 1:
            break  # the epoch is over: its samples are complete
    assert seen == order_of(case)


@BOUNDED
@given(case=data(even_batches=True), world_size=WORLDS, skip=st.integers(0, 10))
def test_skipping_leaves_out_the_first_steps(case: Data, world_size: int, skip: int) -> None:
    assume(usable(case, world_size) and not case.huge)
    whole = steps_of(case.world(world_size))
    skipped = steps_of([skip_first_batches(loader, skip) for loader in case.world(world_size)])
    assert [step.batches for step in skipped] == [step.batches for step in whole[skip:]]


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=data(workers=2, kind="map", even_batches=True), world_size=st.integers(1, 3), stop=st.integers(1, 4))
def test_batches_that_workers_prefetched_do_not_count_as_consumed(case: Data, world_size: int, stop: int) -> None:
    assume(usable(case, world_size))
    whole = steps_of(case.world(world_size))
    begun = steps_of(case.world(world_size), limit=stop)
    assume(begun and begun[-1].states[0]["epoch"] == 0)
    resumed = case.world(world_size)
    for loader in resumed:
        loader.load_state_dict(begun[-1].states[0])
    rest = steps_of(resumed, seed=99)
    assert [step.batches for step in begun + rest] == [step.batches for step in whole]


def samples_seen(kind: str, shuffle: bool, n: int, dispatch: bool) -> tuple[list[int], list[int]]:
    """Return the samples of this rank in an epoch, and those that metrics count over all ranks; no seed is set."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    torch.seed()
    loader = accelerator.prepare(Data(n=n, batch_size=4, shuffle=shuffle, kind=kind).plain())
    given, counted = [], []
    for batch in loader:
        given += batch.tolist()
        counted += accelerator.gather_for_metrics(batch).tolist()
    return given, counted


@pytest.mark.parametrize("world_size", [at_night(1), 2, 3, at_night(4)])
@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [at_night("sampler of batches", False), ("sampler of batches", True), ("stream of batches", False)],
)
def test_ranks_that_draw_different_numbers_see_every_sample_once(kind: str, shuffle: bool, world_size: int) -> None:
    for n in (22, 24):
        for dispatch in (False, True):
            per_rank = run_on_ranks(world_size, samples_seen, kind=kind, shuffle=shuffle, n=n, dispatch=dispatch)
            assert {sample for given, _ in per_rank for sample in given} == set(range(n))
            assert all(sorted(counted) == list(range(n)) for _, counted in per_rank)
