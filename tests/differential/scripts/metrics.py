"""What ranks tell each other: gathered metrics, padding, reductions, broadcasts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from ..registry import Observer, script
from .data import Numbers, Records


class Pair(NamedTuple):
    """A named pair, as models return them."""

    first: Any
    second: Any


@script("one", "two")
def metrics_of_an_uneven_end(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    for split in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        for size in (7, 8, 9, 3, 1):
            loader = accelerator.prepare(DataLoader(range(size), batch_size=4))
            observe(metrics=[accelerator.gather_for_metrics(batch).tolist() for batch in loader])


@script("one", "two")
def metrics_of_streams(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    for dispatch in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        for size in (8, 11, 17):
            loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=4))
            seen = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
            observe(**{f"{'dispatched' if dispatch else 'sharded'} {size}": seen})


@script("one", "two")
def metrics_of_nested_batches(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(Records(), batch_size=2)):
        numbers = {
            "id": batch["id"],
            "pair": (batch["vector"], [batch["id"] * 2]),
            "named": Pair(batch["id"], batch["id"]),
        }
        gathered = accelerator.gather_for_metrics(numbers)
        observe(nested=gathered, kind=type(gathered["named"]).__name__)


@script("two")
def metrics_in_mappings_with_text(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(Records(), batch_size=2)):
        observe(mapping=accelerator.gather_for_metrics({"id": batch["id"], "text": batch["text"]}))


@script("one", "two")
def metrics_that_are_text(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(Records(), batch_size=2)):
        observe(asked=accelerator.gather_for_metrics(batch["text"], use_gather_object=True))
        observe(found=accelerator.gather_for_metrics(batch["text"]))
        observe(counts=accelerator.gather_for_metrics([len(batch["text"])], use_gather_object=True))


@script("one", "two")
def metrics_of_scalars(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(torch.arange(7.0), batch_size=2)):
        observe(loss=accelerator.gather_for_metrics(batch.mean()), gathered=accelerator.gather(batch.sum()))


@script("one", "two")
def metrics_of_repeated_means(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for data in (torch.arange(5.0), torch.arange(8.0)):
        for batch in accelerator.prepare(DataLoader(data, batch_size=2)):
            repeated = batch.mean().repeat(2)  # as transformers' Trainer weighs the loss of a batch
            observe(mean=accelerator.gather_for_metrics(repeated), nested=accelerator.gather_for_metrics([repeated]))
    for batch in accelerator.prepare(DataLoader(torch.arange(5.0), batch_size=2)):
        observe(beams=accelerator.gather_for_metrics(batch.repeat_interleave(3)))


@script("one")
def metrics_of_a_stream_on_one_process(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(Numbers(5), batch_size=2)):
        observe(mean=accelerator.gather_for_metrics(batch.float().mean().repeat(2)))
        observe(objects=accelerator.gather_for_metrics(["a", "b"]), text=accelerator.gather_for_metrics({"a": "b"}))


@script("one", "two")
def gather_everything(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    rank = accelerator.process_index
    observe(vector=accelerator.gather(torch.tensor([rank, rank + 10])))
    observe(matrix=accelerator.gather(torch.full((2, 3), float(rank))))
    observe(scalar=accelerator.gather(torch.tensor(rank)))
    observe(nested=accelerator.gather({"a": torch.tensor([rank]), "b": [torch.tensor([1.5])]}))
    observe(half=accelerator.gather(torch.tensor([rank], dtype=torch.bfloat16)))
    observe(flags=accelerator.gather(torch.tensor([rank == 0])))
    observe.raises("text", accelerator.gather, "text")


@script("one", "two")
def gather_objects(observe: Observer) -> None:
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, gather_object

    state = PartialState(cpu=True)
    rank = state.process_index
    observe(list=gather_object([f"rank {rank}", rank]), uneven=gather_object([rank] * (rank + 1)))
    observe(broadcast=broadcast_object_list([f"rank {rank}", {"rank": rank}]))
    objects = [rank, rank]
    broadcast_object_list(objects, from_process=state.num_processes - 1)
    observe(in_place=objects)


@script("one", "two")
def pad_across_processes(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import pad_across_processes as pad

    accelerator = Accelerator()
    rows = torch.arange(2 * (2 + accelerator.process_index)).reshape(2, -1) + 1
    observe(columns=accelerator.pad_across_processes(rows, dim=1), rows=accelerator.pad_across_processes(rows.T))
    observe(first=accelerator.pad_across_processes(rows, dim=1, pad_index=-100, pad_first=True))
    observe(nested=pad({"a": rows, "b": [rows.T]}, dim=1, pad_index=9))
    observe(too_far=accelerator.pad_across_processes(torch.ones(2), dim=3))
    observe(negative=accelerator.pad_across_processes(rows, dim=-1))


@script("one", "two")
def reduce_everything(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    value = torch.tensor([1.0, 2.0]) * (accelerator.process_index + 1)
    observe(sum=accelerator.reduce(value.clone()), mean=accelerator.reduce(value.clone(), reduction="mean"))
    observe(nested=accelerator.reduce({"a": value.clone(), "b": (value.clone(),)}, reduction="sum"))
    observe(none=accelerator.reduce(value.clone(), reduction="none"), scalar=accelerator.reduce(value[0].clone()))


@script("two")
def reduce_with_a_scale(observe: Observer) -> None:
    from accelerate import Accelerator

    observe(scaled=Accelerator().reduce(torch.ones(2), reduction="mean", scale=0.5))


@script("two")
def mean_of_integers(observe: Observer) -> None:
    from accelerate import Accelerator

    observe.raises("mean", Accelerator().reduce, torch.tensor([1, 4]), "mean")


@script("one", "two")
def broadcast_tensors(observe: Observer) -> None:
    from accelerate import PartialState
    from accelerate.utils import broadcast

    state = PartialState(cpu=True)
    value = {"a": torch.full((2,), state.process_index), "b": [torch.tensor(state.process_index * 1.5)]}
    observe(first=broadcast(value), last=broadcast(torch.tensor([state.process_index]), state.num_processes - 1))


@script("one", "two")
def trigger(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    observe(before=accelerator.check_trigger())
    if accelerator.is_last_process:
        accelerator.set_trigger()
    observe(set=accelerator.check_trigger(), after=accelerator.check_trigger())
