"""Who a process is, what only some of them do, what each of them says."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..registry import Observer, script


@contextlib.contextmanager
def said(observe: Observer, name: str) -> Any:
    """Note what a process prints meanwhile, without the bars and blanks of terminals."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
    observe(**{name: text.getvalue()})


@contextlib.contextmanager
def logged(observe: Observer, logger: Any, name: str) -> Any:
    """Note the records that a logger emits in this process meanwhile."""
    records: list[list[str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append([record.levelname, record.getMessage()])  # type: ignore[method-assign]
    logger.logger.addHandler(handler)
    yield
    logger.logger.removeHandler(handler)
    observe(**{name: records})


@script("one", "two")
def who_am_i(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for who in (accelerator, accelerator.state):
        observe(ranks=[who.process_index, who.local_process_index, who.num_processes])
        observe(roles=[who.is_main_process, who.is_local_main_process, who.is_last_process])
        observe(kind=who.distributed_type, distributed=who.use_distributed, precision=who.mixed_precision)
        observe(device_kind=torch.device(who.device).type)
    observe(device=accelerator.device, backend=accelerator.state.backend, debug=accelerator.state.debug)
    observe(initialized=accelerator.state.initialized, step=accelerator.step, clipping=accelerator.sync_gradients)
    observe(scheduler=accelerator.step_scheduler_with_optimizer, placement=accelerator.device_placement)
    observe(rng=accelerator.rng_types, trackers=accelerator.trackers, fork=accelerator.state.fork_launched)
    observe(seedable=accelerator.use_seedable_sampler, dispatch=accelerator.dispatch_batches)
    observe(blocking=accelerator.non_blocking, stateful=accelerator.use_stateful_dataloader)


@script("one", "two")
def partial_state(observe: Observer) -> None:
    from accelerate import PartialState

    state = PartialState(cpu=True)
    observe(ranks=[state.process_index, state.local_process_index, state.num_processes, state.is_last_process])
    observe(kind=state.distributed_type, shared=PartialState().num_processes, initialized=state.initialized)
    observe(default_device=state.default_device, distributed=state.use_distributed)


@script("two")
def partial_state_by_the_environment(observe: Observer) -> None:
    from accelerate import PartialState

    observe(processes=PartialState().num_processes)


@script("one", "two")
def second_accelerator(observe: Observer) -> None:
    from accelerate import Accelerator

    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    second = Accelerator()
    observe(precision=[first.mixed_precision, second.mixed_precision])
    observe(steps=[first.gradient_accumulation_steps, second.gradient_accumulation_steps])
    observe.raises("another precision", Accelerator, mixed_precision="fp16")
    observe(later=Accelerator().mixed_precision)
    observe(same=first.process_index == second.process_index)


@script("one", "two")
def second_accelerator_that_compiles(observe: Observer) -> None:
    from accelerate import Accelerator

    first, second = Accelerator(dynamo_backend="eager"), Accelerator()
    observe(backend=[str(one.state.dynamo_plugin.backend) for one in (first, second)])
    observe(another=Accelerator(dynamo_backend="aot_eager").state.dynamo_plugin.backend)


@script("one", "two")
def wrong_arguments(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    observe.raises("precision", Accelerator, mixed_precision="fp15")
    observe.raises("handler", Accelerator, kwargs_handlers=["text"])
    observe.raises("twice", Accelerator, kwargs_handlers=[InitProcessGroupKwargs(), InitProcessGroupKwargs()])
    observe.raises("unknown", Accelerator, nonsense=True)
    observe.raises("tracker", Accelerator, log_with="nonsense")
    observe.raises("tracker without a folder", Accelerator, log_with="tensorboard")
    observe.raises("rng type", Accelerator, rng_types=["nonsense"])
    observe.raises("dynamo", Accelerator, dynamo_backend="nonsense")


@script("one", "two")
def settings_from_the_environment(observe: Observer) -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "3"
    from accelerate import Accelerator

    accelerator = Accelerator()
    observe(precision=accelerator.mixed_precision, steps=accelerator.gradient_accumulation_steps)


@script("one", "two")
def split_between_processes(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for inputs in (["a", "b", "c"], ["a"], torch.arange(5), list(range(4)), "abc"):
        for padding in (False, True):
            with accelerator.split_between_processes(inputs, apply_padding=padding) as mine:
                observe(mine=mine)
    for padding in (False, True):
        with accelerator.split_between_processes({"a": [1, 2, 3], "b": torch.arange(3)}, apply_padding=padding) as mine:
            observe(dictionary=mine)
    for name, inputs in (("nothing", []), ("tuple", ("a", "b", "c"))):
        with accelerator.split_between_processes(inputs) as mine:
            observe(mine=mine)
        padded = accelerator.split_between_processes(inputs, apply_padding=True)
        observe.raises(f"{name} padded", padded.__enter__)
    observe.raises(
        "uneven dictionary", lambda: accelerator.split_between_processes({"a": [1], "b": [1, 2]}).__enter__()
    )


@script("one", "two")
def main_process_first(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for context in (accelerator.main_process_first, accelerator.local_main_process_first):
        with context():
            with Path("order.txt").open("a") as file:
                file.write(f"{accelerator.process_index} ")
            observe(seen=Path("order.txt").read_text().split()[-1 - accelerator.process_index :])
        accelerator.wait_for_everyone()


@script("one", "two")
def only_some_processes(observe: Observer) -> None:
    from accelerate import Accelerator, PartialState

    accelerator = Accelerator()
    state = PartialState()
    last = accelerator.num_processes - 1
    observe(main=accelerator.on_main_process(lambda: "ran")(), last=accelerator.on_last_process(lambda: "ran")())
    observe(local=accelerator.on_local_main_process(lambda x: x)(3))
    observe(first=accelerator.on_process(lambda: "ran", process_index=0)())
    observe(chosen=accelerator.on_process(process_index=last)(lambda: "ran")())
    observe(local_chosen=accelerator.on_local_process(lambda: "ran", local_process_index=0)())
    observe(state=state.on_main_process(lambda: "ran")(), state_last=state.on_last_process(lambda: "ran")())
    observe(state_chosen=state.on_process(lambda: "ran", process_index=0)())

    @accelerator.on_main_process
    def named(value: int) -> int:
        """Tell."""
        return value

    observe(value=named(4), absent=accelerator.on_process(lambda: "ran", process_index=9)())


@script("one", "two")
def printing(observe: Observer) -> None:
    from accelerate import Accelerator, PartialState

    accelerator = Accelerator()
    with said(observe, "accelerator"):
        accelerator.print("hello", accelerator.process_index, sep="-", end="!")
    with said(observe, "state"):
        PartialState().print("hello")
    from accelerate.utils.tqdm import tqdm

    with contextlib.redirect_stderr(io.StringIO()) as bar:
        observe(items=list(tqdm(range(3))))
    observe(bar=bool(bar.getvalue()))


@script("one", "two")
def log_lines(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.logging import get_logger

    Accelerator()
    logger = get_logger("differential.lines", log_level="INFO")
    with logged(observe, logger, "lines"):
        logger.debug("quiet")
        logger.info("main only %d", 3)
        logger.info("everybody", main_process_only=False)
        logger.warning("in order", main_process_only=False, in_order=True)
        logger.error("both", main_process_only=True, in_order=True)
        logger.log(logging.CRITICAL, "by level")
        for _ in range(2):
            logger.warning_once("once")
    observe(level=logger.logger.level, enabled=logger.isEnabledFor(logging.DEBUG), name=logger.logger.name)


@script("one", "two")
def log_level_from_the_environment(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.logging import get_logger

    os.environ["ACCELERATE_LOG_LEVEL"] = "error"
    Accelerator()
    logger = get_logger("differential.level")
    with logged(observe, logger, "lines"):
        logger.warning("quiet")
        logger.error("loud")


@script("one", "two")
def log_before_any_state(observe: Observer) -> None:
    from accelerate.logging import get_logger

    observe.raises("info", get_logger("differential.early").info, "text")


@script("one", "two")
def seeds(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    Accelerator()
    for device_specific in (False, True):
        set_seed(42, device_specific=device_specific)
        observe(drawn=[random.random(), float(np.random.rand()), torch.rand(1).item()])
    set_seed(1, deterministic=True)
    observe(deterministic=torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(False)


@script("one", "two")
def generators_synchronised(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import synchronize_rng_states

    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    generator = torch.Generator().manual_seed(accelerator.process_index + 7)
    synchronize_rng_states(["torch", "generator"], generator)
    observe(drawn=torch.rand(2), own=torch.rand(2, generator=generator))


@script("one", "two")
def batch_size_found(observe: Observer) -> None:
    from accelerate.utils import find_executable_batch_size

    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, extra: int) -> int:
        tried.append(batch_size)
        if batch_size > 13:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 MiB")
        return batch_size + extra

    observe(result=train(5), tried=tried)

    @find_executable_batch_size(starting_batch_size=2)
    def never(batch_size: int) -> None:
        raise RuntimeError("CUDA out of memory.")

    @find_executable_batch_size(starting_batch_size=2)
    def other(batch_size: int) -> None:
        raise KeyError("something else")

    @find_executable_batch_size(starting_batch_size=9, reduce_batch_size_fn=lambda: 1)
    def chosen(batch_size: int) -> int:
        return batch_size

    observe.raises("never", never)
    observe.raises("other", other)
    observe.raises("called with a size", train, 64, 5)
    observe(chosen=chosen())


@script("one", "two")
def wait_for_everyone(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import wait_for_everyone as wait

    accelerator = Accelerator()
    if accelerator.is_last_process:
        Path("done").touch()
    accelerator.wait_for_everyone()
    observe(done=Path("done").exists())
    wait()
    accelerator.end_training()
    observe(alive=torch.distributed.is_initialized())


@script("one", "two")
def evaluation_loop(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(3)
    model = accelerator.prepare(torch.nn.Linear(2, 3))
    data = [(torch.full((2,), float(i)), i % 3) for i in range(11)]
    model.eval()
    right = total = 0
    for inputs, labels in accelerator.prepare(DataLoader(data, batch_size=2)):  # type: ignore[arg-type]
        with torch.inference_mode():
            predictions = model(inputs).argmax(-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += int((predictions == labels).sum())
        total += len(labels)
    observe(right=right, total=total)
