"""The checks of `meshwright test`: each runs one operation that training needs, and compares the result.

A check returns one line of evidence, or raises. Every process runs it.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...accelerator import Accelerator
    from .script import Bench

Check = Callable[["Bench"], str]

_BATCH = 4
_TOLERANCE = 1e-5


class UnexpectedResult(Exception):
    """A result differs from the expected one."""


def expect(what: str, found: object, wanted: object) -> None:
    """Raise unless a result is the expected one."""
    if found != wanted:
        raise UnexpectedResult(f"{what}: expected {wanted}, got {found}")


# --- identity ---------------------------------------------------------------------------------------------------------


def identity(bench: Bench) -> str:
    """Every process has a rank, a local rank and a device of its own."""
    from ...runtime.collectives.operations import gather_object
    from ...runtime.devices.device import is_cpu

    here = bench.accelerator
    everyone = gather_object([(here.process_index, socket.gethostname(), here.local_process_index, str(here.device))])
    expect("ranks", [rank for rank, *_ in everyone], list(range(bench.world_size)))
    local_ranks = {(host, local_rank) for _, host, local_rank, _ in everyone}
    expect("different (host, local rank)", len(local_ranks), bench.world_size)
    if not is_cpu(here.device):
        devices = {(host, device) for _, host, _, device in everyone}
        expect("different (host, device)", len(devices), bench.world_size)
    return ", ".join(f"{rank}: {device}" for rank, _, _, device in everyone[:8])


# --- collectives ------------------------------------------------------------------------------------------------------


def gather(bench: Bench) -> str:
    """Tensors arrive in the order of the ranks."""
    gathered = bench.accelerator.gather(bench.tensor([bench.rank, -bench.rank])).tolist()
    expect("gathered", gathered, [value for rank in bench.ranks for value in (rank, -rank)])
    return f"{len(gathered)} values in rank order"


def reduce(bench: Bench) -> str:
    """Sums and means are those of all ranks."""
    mine = bench.tensor([bench.rank + 1.0, 2.0])
    total = sum(bench.ranks) + bench.world_size
    expect("sum", bench.accelerator.reduce(mine, "sum").tolist(), [total, 2.0 * bench.world_size])
    expect("mean", bench.accelerator.reduce(mine, "mean").tolist(), [total / bench.world_size, 2.0])
    return f"sum {total}, mean {total / bench.world_size:g}"


def broadcast(bench: Bench) -> str:
    """Any rank can broadcast."""
    from ...runtime.collectives import operations as collectives

    for source in {0, bench.world_size - 1}:
        received = collectives.broadcast(bench.tensor([bench.rank, 7]), from_process=source).tolist()
        expect(f"broadcast from rank {source}", received, [source, 7])
    return f"from rank 0 and from rank {bench.world_size - 1}"


def objects(bench: Bench) -> str:
    """Python objects are gathered too."""
    from ...runtime.collectives.operations import gather_object

    found = gather_object([{"rank": bench.rank, "name": "ä" * bench.rank}])
    expect("gathered objects", found, [{"rank": rank, "name": "ä" * rank} for rank in bench.ranks])
    return f"{len(found)} of different size"


def padding(bench: Bench) -> str:
    """Ragged tensors are padded, then gathered."""
    padded = bench.accelerator.pad_across_processes(bench.tensor([1] * (bench.rank + 1)), pad_index=-1)
    rows = bench.accelerator.gather(padded).reshape(bench.world_size, -1).tolist()
    expect("padded rows", rows, [[1] * (rank + 1) + [-1] * (bench.world_size - rank - 1) for rank in bench.ranks])
    return f"lengths 1 to {bench.world_size}"


# --- process control --------------------------------------------------------------------------------------------------


def main_process_first(bench: Bench) -> str:
    """Rank 0 has left the block before another rank enters it."""
    with bench.accelerator.main_process_first():
        if bench.rank == 0:
            time.sleep(0.05)
            bench.store.set(bench.key("first"), "")
        elif not bench.store.check([bench.key("first")]):
            raise UnexpectedResult("this rank entered main_process_first() before rank 0 had left it")
    return "rank 0 went ahead"


def wait_for_everyone(bench: Bench) -> str:
    """No rank continues before the last one has arrived."""
    time.sleep(0.1 * (bench.rank == bench.world_size - 1))
    bench.store.add(bench.key("arrived"), 1)
    bench.accelerator.wait_for_everyone()
    expect("processes that had arrived", bench.store.add(bench.key("arrived"), 0), bench.world_size)
    return f"{bench.world_size} arrived"


# --- data -------------------------------------------------------------------------------------------------------------


def shuffled_data(bench: Bench) -> str:
    """A shuffled epoch shows every sample exactly once, although the samples do not divide among the processes."""
    num_samples = 3 * _BATCH * bench.world_size + 3
    seen = _samples(bench.new_accelerator(), num_samples)
    expect("samples in order", sorted(seen), list(range(num_samples)))
    if seen == sorted(seen):
        raise UnexpectedResult("shuffle=True left the samples in their order")
    return f"{num_samples} of {num_samples} samples, each once"


def dispatched_data(bench: Bench) -> str:
    """The same, where rank 0 reads for all ranks."""
    num_samples = 3 * _BATCH * bench.world_size + 1
    seen = _samples(bench.new_accelerator(dispatch_batches=True), num_samples, shuffle=False)
    expect("samples", seen, list(range(num_samples)))
    return f"{num_samples} of {num_samples} samples, in order"


def resumed_data(bench: Bench) -> str:
    """A loader that skips its first batches continues with the very next sample."""
    num_samples = 4 * _BATCH * bench.world_size + 2
    options = {"use_seedable_sampler": True, "data_seed": 5}
    whole = _samples(bench.new_accelerator(**options), num_samples)
    rest = _samples(bench.new_accelerator(**options), num_samples, skip=2)
    consumed = 2 * _BATCH * bench.world_size
    expect("samples after the skipped ones", rest, whole[consumed:])
    return f"{len(rest)} samples after {consumed} skipped"


def _samples(accelerator: Accelerator, num_samples: int, *, shuffle: bool = True, skip: int = 0) -> list[int]:
    from torch.utils.data import DataLoader

    numbers: Any = range(num_samples)
    loader = accelerator.prepare(DataLoader(numbers, batch_size=_BATCH, shuffle=shuffle))
    if skip:
        loader = accelerator.skip_first_batches(loader, skip)
    return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


# --- training ---------------------------------------------------------------------------------------------------------


def training(bench: Bench) -> str:
    """Training on these processes gives the weights of one process with the same global batches."""
    return _compare_with_one_process(bench, accumulation=1)


def accumulation(bench: Bench) -> str:
    """Accumulated micro-batches give the gradients of the large batch."""
    return _compare_with_one_process(bench, accumulation=2)


def _compare_with_one_process(bench: Bench, accumulation: int) -> str:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    num_steps, global_batch = 6, _BATCH * bench.world_size * accumulation
    features, labels = _problem(bench, num_steps * global_batch)

    expected, optimizer = _network(bench)
    for step in range(num_steps):
        rows = slice(step * global_batch, (step + 1) * global_batch)
        _loss(expected, features[rows], labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    accelerator = bench.new_accelerator(accumulation=accumulation)
    loader = DataLoader(TensorDataset(features.cpu(), labels.cpu()), batch_size=_BATCH)
    model, optimizer, loader = accelerator.prepare(*_network(bench), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, *batch))
            optimizer.step()
            optimizer.zero_grad()

    trained = accelerator.unwrap_model(model)
    pairs = zip(trained.parameters(), expected.parameters(), strict=True)
    difference = max(torch.max(torch.abs(ours - theirs)).item() for ours, theirs in pairs)
    if not difference <= _TOLERANCE:
        raise UnexpectedResult(f"weights differ by {difference:.1e} from those of one process; {_TOLERANCE} is allowed")
    return f"weights within {difference:.0e} of one process after {num_steps} steps of {global_batch}"


def mixed_precision(bench: Bench) -> str:
    """The number format of this run trains: the loss is finite and falls."""
    accelerator = bench.accelerator
    features, labels = _problem(bench, 8 * _BATCH)
    model, optimizer = accelerator.prepare(*_network(bench))
    losses = []
    for _ in range(20):
        loss = _loss(model, features, labels)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if not all(map(math.isfinite, losses)) or losses[-1] >= 0.9 * losses[0]:
        raise UnexpectedResult(
            f"losses in {accelerator.mixed_precision} do not fall: {losses[0]:.4g} to {losses[-1]:.4g}"
        )
    return f"{accelerator.mixed_precision}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"


def _network(bench: Bench) -> tuple[nn.Module, Any]:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model.to(bench.device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def _problem(bench: Bench, num_samples: int) -> tuple[Tensor, Tensor]:
    import torch

    features = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(2))
    features = features.to(bench.device)
    return features, features.sum(dim=1, keepdim=True).sin()


def _loss(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import mse_loss

    return mse_loss(model(features), labels)


# --- random numbers ---------------------------------------------------------------------------------------------------


def random_state(bench: Bench) -> str:
    """Generators can be seeded equally on all ranks, and differently."""
    import torch

    from ...runtime.devices.device import finest_float
    from ...runtime.loop.random import set_seed, synchronize_rng_states

    def draws() -> set[float]:
        drawn = torch.rand(1, dtype=finest_float(bench.device)).to(bench.device)
        return set(bench.accelerator.gather(drawn).tolist())

    with torch.random.fork_rng(devices=[]):
        set_seed(3, device_specific=True)
        expect("different draws after set_seed(device_specific=True)", len(draws()), bench.world_size)
        synchronize_rng_states(["torch"])
        expect("different draws after synchronize_rng_states", len(draws()), 1)
    return "different by rank, then equal"


CHECKS: dict[str, Check] = {
    "ranks and devices": identity,
    "gather": gather,
    "reduce": reduce,
    "broadcast": broadcast,
    "gather objects": objects,
    "pad and gather": padding,
    "main process first": main_process_first,
    "wait for everyone": wait_for_everyone,
    "shuffled data": shuffled_data,
    "dispatched data": dispatched_data,
    "resumed data": resumed_data,
    "training": training,
    "accumulation": accumulation,
    "mixed precision": mixed_precision,
    "random state": random_state,
}
