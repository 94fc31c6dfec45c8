"""The checks of `meshwright test --report` for weights on the move: offload, background save, resume, stragglers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.environment import patch_environment
from ...temporary import new_folder, remove_folder, temporary_folder
from .checks import Check, UnexpectedResult, expect

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .script import Bench

_LAYERS, _WIDTH = 6, 64
_SLOW_SECONDS = 0.05
_ROUNDING = 1e-5
_STRAGGLER_TIME_LIMIT = 30.0


def state_checks(world_size: int) -> dict[str, Check]:
    """Return the checks that a world of this size can run."""
    checks: dict[str, Check] = {"offload": offload, "background save": background_save, "resume": resume}
    return checks if world_size == 1 else checks | {"straggler": straggler}


def offload(bench: Bench) -> str:
    """A model whose weights are on the host or on disk computes the same, with the next layer prefetched."""
    import torch

    from ...inference.dispatch import cpu_offload, disk_offload

    model = _model().to(bench.device)
    inputs = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(0)).to(bench.device)
    with torch.no_grad():
        expected = model(inputs)
    with temporary_folder("test") as folder, torch.no_grad():
        for place in ("host", "disk"):
            fresh = _model()
            if place == "host":
                cpu_offload(fresh, execution_device=bench.device)
            else:
                disk_offload(fresh, folder, execution_device=bench.device)
            for _ in range(3):
                if not torch.equal(fresh(inputs), expected):
                    raise UnexpectedResult(f"a model whose weights are on the {place} computes something else")
    return "from host and disk, equal in 3 forward passes each"


def background_save(bench: Bench) -> str:
    """A save in the background holds the values of its moment, and opens no context on another device."""
    import torch

    from ...runtime.devices.device import contexts

    bench.reopen_group(mixed_precision="no")
    with _shared_folder(bench) as folder:
        model, optimizer = _prepared(bench)
        _step(bench, model, optimizer)
        saved = _parameters(model)
        start = time.perf_counter()
        bench.accelerator.save_state(folder, wait=False)
        blocked = time.perf_counter() - start
        for _ in range(3):  # overwrite the weights while they are written
            _step(bench, model, optimizer)
        bench.accelerator.load_state(folder)
        if not all(map(torch.equal, _parameters(model), saved)):
            raise UnexpectedResult("the checkpoint holds other weights than those at the time of the save")
    used = contexts(bench.device)
    if used is not None:
        expect("devices with a context of this process", used, [bench.device.index or 0])
    bench.reopen_group()
    counted = "contexts unknown" if used is None else "1 context"
    return f"weights of the call; {blocked * 1e3:.0f} ms blocked; {counted}"


def resume(bench: Bench) -> str:
    """A run that is resumed in the middle of an epoch goes on like one that was not interrupted.

    Not to the last bit: DDP sorts its buckets after the first step, and a sum of three or more depends on the order.
    """
    import torch

    bench.reopen_group(mixed_precision="no")
    with _shared_folder(bench) as folder:
        model, optimizer, loader = _prepared(bench, with_loader=True)
        for number, (inputs,) in enumerate(loader):
            _step(bench, model, optimizer, inputs)
            if number == 1:
                bench.accelerator.save_state(folder)
        expected = _parameters(model)
        bench.reopen_group(mixed_precision="no")
        model, optimizer, loader = _prepared(bench, with_loader=True)
        bench.accelerator.resume(folder)
        batches = 0
        for (inputs,) in loader:
            _step(bench, model, optimizer, inputs)
            batches += 1
        expect("batches after the resume", batches, 4)
        pairs = zip(_parameters(model), expected, strict=True)
        difference = max(torch.max(torch.abs(ours - theirs)).item() for ours, theirs in pairs)
        if not difference <= _ROUNDING:
            raise UnexpectedResult(f"the resumed run ended with other weights: they differ by {difference:.1e}")
    bench.reopen_group()
    return f"{batches} of 6 batches left; weights within {difference:.0e}"


def straggler(bench: Bench) -> str:
    """A rank that is slow is found by the run itself, with the phase in which it is slow."""
    from torch.utils.data import DataLoader, Dataset

    from ...runtime import phases

    slow_rank = bench.world_size - 1

    class SlowSamples(Dataset[int]):
        def __len__(self) -> int:
            return 10_000 * bench.world_size

        def __getitem__(self, index: int) -> int:
            time.sleep(_SLOW_SECONDS * (bench.rank == slow_rank))
            return index

    with patch_environment(MESHWRIGHT_HANG_SECONDS="60"):  # the watcher finds stragglers, too
        bench.reopen_group(mixed_precision="no")
    model, optimizer = _prepared(bench)
    found: dict[str, Any] = {}
    deadline = time.monotonic() + _STRAGGLER_TIME_LIMIT
    for _ in bench.accelerator.prepare(DataLoader(SlowSamples(), batch_size=1)):
        _step(bench, model, optimizer)
        clock = phases.clock
        found = (clock and clock.extra_values) or {}
        is_over = bench.tensor([float(bool(found) or time.monotonic() > deadline)])
        if bench.accelerator.reduce(is_over).item() > 0:
            break
    bench.reopen_group()
    if bench.rank > 0:
        return ""
    expect("slow rank", found.get("straggler/rank"), slow_rank)
    expect("phase", found.get("straggler/phase"), "data")
    return f"rank {slow_rank} was slowed down, and named ({found['straggler/cost']:.0%} of a step)"


@contextmanager
def _shared_folder(bench: Bench) -> Iterator[str]:
    """Yield a folder that all processes see: of the working directory if there are several machines."""
    from ...runtime.collectives.operations import broadcast_object_list

    here = bench.accelerator.state._runtime.process
    parent = None if here.local_world_size == bench.world_size else "."
    (folder,) = broadcast_object_list([str(new_folder("test", parent)) if bench.rank == 0 else None])
    try:
        yield str(Path(folder, "checkpoint"))
        bench.accelerator.wait_for_everyone()
    finally:
        if bench.rank == 0:
            remove_folder(Path(folder))


def _model() -> nn.Module:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _prepared(bench: Bench, *, with_loader: bool = False) -> tuple[Any, ...]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = _model()
    parts: list[Any] = [model, torch.optim.AdamW(model.parameters(), lr=1e-2)]
    if with_loader:
        samples = torch.randn(6 * 4 * bench.world_size, _WIDTH, generator=torch.Generator().manual_seed(4))
        parts.append(DataLoader(TensorDataset(samples), batch_size=4, shuffle=True))
    return tuple(bench.accelerator.prepare(*parts))


def _step(bench: Bench, model: Any, optimizer: Any, inputs: Tensor | None = None) -> None:
    import torch

    inputs = torch.ones(4, _WIDTH, device=bench.device) if inputs is None else inputs
    bench.accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
