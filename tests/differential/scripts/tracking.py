"""What a tracker is told, and by which rank."""

from __future__ import annotations

from typing import Any

from ..registry import Observer, script


def own_tracker(calls: list[Any]) -> Any:
    """Return a tracker that remembers what it is told."""
    from accelerate import PartialState
    from accelerate.tracking import GeneralTracker, on_main_process

    PartialState(cpu=True)

    class Memory(GeneralTracker):
        name = "memory"
        requires_logging_directory = False

        @on_main_process
        def __init__(self, run_name: str) -> None:
            super().__init__()
            self.run_name = run_name
            calls.append(["init", run_name])

        @property
        def tracker(self) -> Any:
            return self.run_name

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            calls.append(["config", dict(values)])

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            calls.append(["log", dict(values), step, kwargs])

        @on_main_process
        def finish(self) -> None:
            calls.append(["finish"])

    return Memory("run")


def end_training(accelerator: Any) -> None:
    """End it on all ranks at once: the group is closed, which would break a rank that is still connecting."""
    accelerator.wait_for_everyone()
    accelerator.end_training()


@script("one", "two")
def tracker_of_ones_own(observe: Observer) -> None:
    from accelerate import Accelerator

    calls: list[Any] = []
    accelerator = Accelerator(log_with=own_tracker(calls))
    accelerator.init_trackers("project", config={"lr": 0.1, "layers": 2})
    accelerator.log({"loss": 1.5}, step=0)
    accelerator.log({"loss": 1.25, "rank": accelerator.process_index}, step=1, log_kwargs={"memory": {"commit": True}})
    accelerator.log({"text": "end"})
    if accelerator.is_main_process:
        observe(
            client=accelerator.get_tracker("memory").tracker, unwrapped=accelerator.get_tracker("memory", unwrap=True)
        )
    end_training(accelerator)
    observe(calls=calls, trackers=len(accelerator.trackers))


@script("one", "two")
def tracker_of_another_rank(observe: Observer) -> None:
    from accelerate import Accelerator

    calls: list[Any] = []
    accelerator = Accelerator(log_with=[own_tracker(calls)])
    accelerator.init_trackers("project")
    observe.raises("unknown name", accelerator.get_tracker, "nonsense")
    end_training(accelerator)
    observe(calls=calls)


@script("one", "two")
def tracker_that_lacks_a_method(observe: Observer) -> None:
    from accelerate.tracking import GeneralTracker

    class Incomplete(GeneralTracker):
        name = "incomplete"

    observe.raises("made", Incomplete)


@script("one", "two")
def no_tracker(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 1.0}, step=0)
    end_training(accelerator)
    observe(trackers=accelerator.trackers, log_with=accelerator.log_with)


@script("one", "two")
def tensorboard_scalars(observe: Observer) -> None:
    from pathlib import Path

    from accelerate import Accelerator
    from accelerate.utils import is_tensorboard_available

    observe(available=is_tensorboard_available())
    accelerator = Accelerator(log_with="tensorboard", project_dir="logs")
    accelerator.init_trackers("project", config={"lr": 0.1, "name": "x"})
    for step in range(3):
        accelerator.log({"loss": 1.0 / (step + 1), "text": "word", "many": {"a": step}}, step=step)
    end_training(accelerator)
    if not accelerator.is_main_process:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in sorted({path.parent for path in Path("logs").rglob("*tfevents*")}):
        events = EventAccumulator(str(folder))
        events.Reload()
        for tag in sorted(events.Tags()["scalars"]):
            observe(**{tag: [[event.step, event.value] for event in events.Scalars(tag)]})
    observe(folders=sorted({path.parts[1] for path in Path("logs").rglob("*tfevents*")}))
    observe(hparams=[path.read_text().strip() for path in sorted(Path("logs").rglob("hparams.yml"))])
