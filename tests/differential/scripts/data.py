"""Which samples reach which rank, in which order, and in what shape."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from ..registry import Observer, script


class Numbers(IterableDataset[int]):
    """A stream of numbers without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


class Records(Dataset[Any]):
    """Rows as dictionaries, with text in them."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "text": f"row {index}", "vector": torch.full((2,), float(index))}


def batches(loader: Any) -> list[Any]:
    """Return what a rank sees of a loader."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


@script("one", "two")
def uneven_end(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for size in (7, 8, 9, 3, 1, 17):
        loader = accelerator.prepare(DataLoader(range(size), batch_size=4))
        observe(length=len(loader), batches=batches(loader), total=loader.total_batch_size)
        observe(dataset_length=loader.total_dataset_length)


@script("one", "two")
def uneven_end_left_uneven(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    observe(even=accelerator.even_batches)
    for size in (7, 8, 9, 17, 20):
        loader = accelerator.prepare(DataLoader(range(size), batch_size=4))
        observe(length=len(loader), batches=batches(loader))


@script("one", "two")
def batches_split_between_processes(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    observe(split=accelerator.split_batches)
    for size in (8, 9, 11, 3):
        loader = accelerator.prepare(DataLoader(range(size), batch_size=4))
        observe(length=len(loader), batches=batches(loader), total=loader.total_batch_size)


@script("one", "two")
def batches_split_and_left_uneven(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False))
    for size in (8, 9, 11):
        loader = accelerator.prepare(DataLoader(range(size), batch_size=4))
        observe(batches=batches(loader))
        observe(**{f"length of {size}": len(loader)})


@script("one", "two")
def batch_that_cannot_be_split(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    observe.raises("batch of 5", accelerator.prepare, DataLoader(range(10), batch_size=5))


@script("one", "two")
def last_batch_dropped(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    for split in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        for size in (7, 9, 14, 16):
            loader = accelerator.prepare(DataLoader(range(size), batch_size=4, drop_last=True))
            observe(length=len(loader), batches=batches(loader))


@script("one", "two")
def batches_of_one(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(3), batch_size=1))
    observe(length=len(loader), batches=batches(loader))


@script("one", "two")
def own_batch_sampler(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    sampler = BatchSampler(SequentialSampler(range(11)), batch_size=3, drop_last=False)
    loader = accelerator.prepare(DataLoader(range(11), batch_sampler=sampler))
    observe(length=len(loader), batches=batches(loader))


@script("one", "two")
def batches_from_a_list(observe: Observer) -> None:
    from accelerate import Accelerator

    plain: DataLoader[int] = DataLoader(range(6), batch_sampler=[[0, 1], [5, 4], [2], [3]])
    observe(batches=batches(Accelerator().prepare(plain)))


@script("one", "two")
def stream(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    for split in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=False, split_batches=split)
        accelerator = Accelerator(dataloader_config=config)
        for size in (8, 11, 2):
            loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=4))
            observe(batches=batches(loader))


@script("one", "two")
def stream_without_its_end(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    for size in (8, 11, 17):
        observe(batches=batches(accelerator.prepare(DataLoader(Numbers(size), batch_size=4, drop_last=True))))


@script("one", "two")
def stream_dispatched(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    for split in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, split_batches=split))
        for size in (8, 11, 17):
            loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=4))
            observe(batches=batches(loader))
            observe.raises("total", lambda loader=loader: loader.total_batch_size)


@script("one", "two")
def stream_by_default(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(13), batch_size=3))
    observe(batches=batches(loader))
    observe.raises("length", len, loader)


@script("one", "two")
def map_style_data_dispatched(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    for size in (7, 8, 17):
        loader = accelerator.prepare(DataLoader(range(size), batch_size=4))
        observe(length=len(loader), batches=batches(loader))


@script("one", "two")
def rows_with_text(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(Records(), batch_size=2)):
        observe(batch=batch)


@script("one", "two")
def end_of_dataloader(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    for dispatch in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(range(11), batch_size=2))
        for _ in range(2):
            observe(outside=accelerator.gradient_state.in_dataloader)
            for _ in loader:
                state = accelerator.gradient_state
                observe(end=state.end_of_dataloader, own=loader.end_of_dataloader, inside=state.in_dataloader)
                observe(remainder=state.remainder if state.end_of_dataloader else None)


@script("one", "two")
def nested_loops(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    train, evaluate = accelerator.prepare(DataLoader(range(8), batch_size=2), DataLoader(range(100, 103), batch_size=2))
    for batch in train:
        observe(order=batch.tolist(), end=accelerator.gradient_state.end_of_dataloader)
        for rows in evaluate:
            gathered = accelerator.gather_for_metrics(rows)
            observe(order=gathered.tolist(), end=accelerator.gradient_state.end_of_dataloader)


@script("one", "two")
def loop_left_early(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
    for batch in loader:
        observe(first=batch.tolist())
        break
    observe(again=batches(loader), end=accelerator.gradient_state.end_of_dataloader)


@script("one", "two")
def first_batches_skipped(observe: Observer) -> None:
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(17), batch_size=2))
    for count in (0, 1, 3):
        rest = accelerator.skip_first_batches(loader, count)
        observe(length=len(rest), batches=batches(rest))
    observe(whole=batches(loader), plain=batches(skip_first_batches(DataLoader(range(6), batch_size=2), 2)))


@script("one", "two")
def more_batches_skipped_than_there_are(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    rest = accelerator.skip_first_batches(accelerator.prepare(DataLoader(range(8), batch_size=2)), 100)
    observe(batches=batches(rest))
    observe.raises("length", len, rest)


@script("one", "two")
def first_batches_of_a_stream_skipped(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    for dispatch in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(Numbers(13), batch_size=2))
        observe(batches=batches(accelerator.skip_first_batches(loader, 2)))


@script("one", "two")
def shuffled(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(7)
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(13), batch_size=2, shuffle=True))
    for _ in range(2):
        epoch = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
        observe(order=epoch, samples=sorted(index for batch in epoch for index in batch))


@script("one", "two")
def shuffled_by_the_seedable_sampler(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(7)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
    for epoch in (0, 1, 5):
        loader.set_epoch(epoch)
        seen = [accelerator.gather(batch).tolist() for batch in loader]
        observe(order=seen, samples=sorted(index for batch in seen for index in batch))


@script("one", "two")
def shuffled_by_own_generator(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    generator = torch.Generator().manual_seed(11)
    sampler = RandomSampler(range(10), generator=generator)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=2, sampler=sampler))
    seen = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    observe(order=seen, samples=sorted(index for batch in seen for index in batch))


class Augmented(Dataset[torch.Tensor]):
    """Numbers with a random one beside each."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


@script("one")
def random_augmentation_beside_a_random_step(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    loader = Accelerator().prepare(DataLoader(Augmented(), batch_size=2))
    set_seed(0)
    for batch in loader:
        observe(index=batch[:, 0], augmented=batch[:, 1], drawn=torch.rand(()))


@script("one", "two")
def batch_sampler_in_the_samplers_place(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for size in (10, 11):
        data = torch.arange(size)
        sampler = BatchSampler(SequentialSampler(data), 4, False)
        plain = DataLoader(data, sampler=sampler, batch_size=None)
        observe.raises("prepare", accelerator.prepare, plain)
        if accelerator.num_processes > 1:
            observe(batches=batches(accelerator.prepare(plain)))


@script("one", "two")
def worker_processes(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(9), batch_size=2, num_workers=1))
    observe(batches=batches(loader))


@script("one", "two")
def loader_attributes(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard

    accelerator = Accelerator()
    plain = DataLoader(range(10), batch_size=2)
    loader = accelerator.prepare(plain)
    observe(shard=isinstance(loader, DataLoaderShard), loader=isinstance(loader, DataLoader))
    observe(dataset=loader.dataset is plain.dataset, again=accelerator.prepare(loader) is loader)
    observe(batch_size=loader.batch_size, drop_last=loader.drop_last, workers=loader.num_workers)
    observe(device=loader.device, one_process=len(plain))


@script("one", "two")
def prepare_by_the_function(observe: Observer) -> None:
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, prepare_data_loader

    for rank in range(3):
        loader = prepare_data_loader(
            DataLoader(range(11), batch_size=2), num_processes=3, process_index=rank, put_on_device=False
        )
        observe(batches=batches(loader))
        for split in (False, True):
            sampler = BatchSampler(SequentialSampler(range(13)), batch_size=6, drop_last=False)
            shard = BatchSamplerShard(sampler, num_processes=3, process_index=rank, split_batches=split)
            observe(indices=list(shard), count=len(shard))
            stream = IterableDatasetShard(
                Numbers(13), batch_size=6, num_processes=3, process_index=rank, split_batches=split
            )
            observe(stream=list(stream))
