"""Instruments: what they see, in which order, and what a run without them pays."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, Instrument
from meshwright.errors import UnsupportedSettingError
from meshwright.instruments import EVENTS, PROCESS, Instruments
from tests.launching import run_accelerate
from tests.ranks import ranks


class Recorder(Instrument):
    """Record the name of every event."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _recording(name: str) -> Any:
    def event(self: Recorder, *_: Any) -> None:
        self.events.append(name)

    return event


for _name in EVENTS:
    setattr(Recorder, _name, _recording(_name))


def train(accelerator: Accelerator, epochs: int = 1) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


MICRO_BATCH = ["body_started", "micro_batch_started", "backward_started", "backward_ended"]
STEP = ["clipped", "step_started", "step_ended"]


def test_every_event_of_a_loop_comes_in_its_order(tmp_path: Path) -> None:
    seen = Recorder()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, instruments=[seen], project_dir=tmp_path)
    train(accelerator)
    prepared = ["attached", "prepare_started", "prepare_ended", "loader_prepared"]
    assert seen.events[:4] == prepared
    loop = [event for event in seen.events[4:] if event != "batch_read"]
    window = [*MICRO_BATCH, "body_ended", *MICRO_BATCH, *STEP, "body_ended"]
    assert loop == ["epoch_started", *window, *window, "epoch_ended"]
    assert seen.events.count("batch_read") == 4
    seen.events.clear()
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.load_state(str(tmp_path / "one"))
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert seen.events == ["saved", "loaded", "logged", "closed"]


def test_a_loop_that_is_left_early_ends_without_being_completed() -> None:
    ends = []

    class Ends(Instrument):
        def epoch_ended(self, loader: Any, completed: bool) -> None:
            ends.append(completed)

    accelerator = Accelerator(cpu=True, instruments=[Ends()])
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
    for _ in loader:
        break
    for _ in loader:
        pass
    assert ends == [False, True]


def test_instruments_are_called_in_the_order_in_which_they_were_added() -> None:
    order: list[str] = []

    class Named(Instrument):
        def __init__(self, name: str) -> None:
            self.name = name

        def backward_started(self, accelerator: Accelerator, loss: Any) -> None:
            order.append(self.name)

        def backward_ended(self, accelerator: Accelerator, loss: Any) -> None:
            order.append(self.name)

    of_process = Named("process")
    PROCESS.add(of_process)
    try:
        accelerator = Accelerator(cpu=True, instruments=[Named("first")])
        accelerator.instruments.add(Named("second"))
        accelerator.backward(torch.ones(1, requires_grad=True).sum())
    finally:
        PROCESS.remove(of_process)
    assert order == ["first", "second", "process"] * 2, "the order is not reversed for the events that end something"
    accelerator.backward(torch.ones(1, requires_grad=True).sum())
    assert order[6:] == ["first", "second"] * 2, "one that was removed is not called any more"


def test_one_that_is_added_or_removed_within_an_event_is_called_from_the_next_event_on() -> None:
    order: list[str] = []

    class Late(Instrument):
        def backward_started(self, accelerator: Accelerator, loss: Any) -> None:
            order.append("late")

    class Adding(Instrument):
        def backward_started(self, accelerator: Accelerator, loss: Any) -> None:
            order.append("adding")
            accelerator.instruments.add(Late())
            accelerator.instruments.remove(self)

    accelerator = Accelerator(cpu=True, instruments=[Adding()])
    for _ in range(2):
        accelerator.backward(torch.ones(1, requires_grad=True).sum())
    assert order == ["adding", "late"]


def test_two_accelerators_are_seen_apart() -> None:
    first, second = Recorder(), Recorder()
    accelerators = [Accelerator(cpu=True, instruments=[seen]) for seen in (first, second)]
    train(accelerators[0])
    assert "step_ended" in first.events
    assert second.events == ["attached"]


def test_an_exception_of_an_instrument_ends_the_loop() -> None:
    class Failing(Instrument):
        def step_started(self, optimizer: Any) -> None:
            raise RuntimeError("the third step")

    with pytest.raises(RuntimeError, match="the third step"):
        train(Accelerator(cpu=True, instruments=[Failing()]))


def test_only_methods_that_are_overridden_are_called() -> None:
    class One(Instrument):
        def clipped(self, accelerator: Accelerator, norm: Any) -> None: ...

    hub = Instruments()
    hub.add(One())
    assert [name for name in EVENTS if getattr(hub, name)] == ["clipped"]


def test_meanwhile_nobody_else_sees_a_trial() -> None:
    seen: dict[str, list[Any]] = {"first": [], "process": [], "trial": []}

    class Seen(Instrument):
        def __init__(self, name: str) -> None:
            self.name = name

        def logged(self, accelerator: Accelerator, values: Mapping[str, Any], step: int | None) -> None:
            seen[self.name].append(step)

    process = Seen("process")
    PROCESS.add(process)
    try:
        accelerator = Accelerator(cpu=True, instruments=[Seen("first")])
        accelerator.log({}, step=1)
        with suppress(ValueError), accelerator.instruments.only(Seen("trial")):
            accelerator.log({}, step=2)
            raise ValueError("it failed")
        accelerator.log({}, step=3)
    finally:
        PROCESS.remove(process)
    assert seen == {"first": [1, 3], "process": [1, 3], "trial": [2]}


def test_a_copied_accelerator_leaves_its_instruments_behind() -> None:
    accelerator = Accelerator(cpu=True, instruments=[Recorder()])
    again = pickle.loads(pickle.dumps(accelerator))
    assert list(again.instruments) == list(PROCESS)


def test_what_is_no_instrument_is_refused() -> None:
    with pytest.raises(TypeError, match="derived from Instrument"):
        Accelerator(cpu=True, instruments=[print])  # type: ignore[list-item]


@ranks(2)
def test_every_rank_has_the_same_events() -> None:
    seen = Recorder()
    train(Accelerator(cpu=True, instruments=[seen]))
    passes = [event for event in seen.events if event in ("backward_started", "backward_ended", "step_ended")]
    assert passes == ["backward_started", "backward_ended", "step_ended"] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Class", "No module named 'no_such_module'"),
        ("json:NoSuchClass", "has no attribute 'NoSuchClass'"),
        ("json", "has no attribute ''"),
        ("collections:Counter", "it makes a Counter, which is no Instrument"),
    ],
)
def test_a_name_of_the_environment_that_leads_nowhere_is_refused(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_INSTRUMENTS", name)
    with pytest.raises(UnsupportedSettingError, match=message):
        Accelerator(cpu=True)


def test_launch_names_an_instrument_for_a_script_that_knows_of_none(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(
        "from meshwright import Instrument\n\nclass Losses(Instrument):\n"
        "    def backward_ended(self, accelerator, loss):\n"
        "        print(f'rank {accelerator.process_index}: {loss.item():.1f}', flush=True)\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "accelerator.backward(torch.full((2,), 3.0, requires_grad=True).mean())\n"
    )
    launched = run_accelerate(
        *("launch", "--cpu", "--num_processes", 2, "--instruments", "losses:Losses", "train.py"),
        directory=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert launched.code == 0, launched.complaints
    assert sorted(launched.printed.splitlines()) == ["rank 0: 3.0", "rank 1: 3.0"]
