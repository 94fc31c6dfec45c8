"""Measure the speed that `meshwright test` reports. No speed is an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import Check
    from .script import Bench


def all_reduce_speed(bench: Bench) -> str:
    """Measure how fast 4 MiB are summed over all processes."""
    import torch
    import torch.distributed as dist

    if bench.world_size == 1:
        return "one process: nothing to send"
    numbers = torch.ones(2**20, device=bench.device)
    seconds = _median_seconds(lambda: dist.all_reduce(numbers), repeat=7)
    return f"4 MiB in {seconds * 1e3:.1f} ms: {numbers.nbytes / seconds / 1e6:,.0f} MB/s"


def matmul_speed(bench: Bench) -> str:
    """Measure how fast every process multiplies matrices, all at the same time."""
    import torch

    from ...runtime.collectives.operations import gather_object

    size = 512
    matrix = torch.ones(size, size, device=bench.device)
    bench.accelerator.wait_for_everyone()
    rate = 2 * size**3 / _median_seconds(lambda: matrix @ matrix, repeat=7) / 1e9
    rates = gather_object([rate])
    worst, best = min(rates), max(rates)
    each = f"{best:,.0f} GFLOP/s" if len(rates) == 1 else f"{worst:,.0f} to {best:,.0f} GFLOP/s per process"
    slowest = f", slowest rank {rates.index(worst)}" if best > 1.2 * worst else ""
    return f"float32 {size} x {size}: {each}{slowest}"


def copy_speed(bench: Bench) -> str:
    """Measure how fast memory of the host arrives on the device, pinned and pageable, on all processes at once."""
    import torch

    from ...runtime.devices.device import is_cpu, pinned

    if is_cpu(bench.device):
        return "no device: nothing to copy"
    pageable = torch.ones(16 * 2**20, dtype=torch.uint8)
    rates = {}
    for kind, source in {"pinned": pinned(pageable), "pageable": pageable}.items():
        bench.accelerator.wait_for_everyone()
        seconds = _median_seconds(lambda source=source: source.to(bench.device), repeat=7)  # type: ignore[misc]
        rates[kind] = source.nbytes / seconds / 1e9
    return "16 MiB: " + ", ".join(f"{kind} {rate:.1f} GB/s" for kind, rate in rates.items())


def collectives_and_torch(bench: Bench) -> str:
    """Compare this package's collectives with torch's, on every backend of the world."""
    import torch
    import torch.distributed as dist

    from ...runtime.collectives.operations import all_gather_single

    if bench.world_size == 1:
        return "one process: nothing to send"
    accelerator, found = bench.accelerator, []
    kinds = dict.fromkeys((bench.device.type, "cpu"))
    for kind in kinds:
        if not _has_backend_for(kind):
            continue
        mine = torch.ones(2**18, device=kind if kind == "cpu" else bench.device)
        everyones = mine.new_empty(bench.world_size * mine.numel())
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "gather": (
                lambda mine=mine: accelerator.gather(mine),  # type: ignore[misc]
                lambda mine=mine, everyones=everyones: all_gather_single(everyones, mine),  # type: ignore[misc]
            ),
            "reduce": (
                lambda mine=mine: accelerator.reduce(mine),  # type: ignore[misc]
                lambda mine=mine: dist.all_reduce(mine.clone()),  # type: ignore[misc]
            ),
        }
        found += [f"{name} on {kind} {_ratio(*pair)}" for name, pair in pairs.items()]
    return "1 MiB: " + "; ".join(found)


def _has_backend_for(kind: str) -> bool:
    import torch
    import torch.distributed as dist

    try:
        dist.group.WORLD._get_backend(torch.device(kind))  # type: ignore[union-attr]
    except RuntimeError:
        return False
    return True


def steps_and_torch(bench: Bench) -> str:
    """Compare a training step by this package with one by torch alone: DDP, and FSDP2 where there are processes."""
    found = [
        f"{name} {_ratio(_our_step(bench, name), _bare_step(bench, name))}" for name in _STEPS[bench.world_size > 1]
    ]
    bench.reopen_group()
    return "; ".join(found)


_STEPS = {False: ("one process",), True: ("DDP", "FSDP2")}
_WIDTH, _LAYERS, _BATCH = 512, 4, 32


def _our_step(bench: Bench, name: str) -> Callable[[], Any]:
    import torch

    from ...config.plugins.sharding import FullyShardedDataParallelPlugin

    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if name == "FSDP2" else {}
    bench.reopen_group(mixed_precision="no", **plugin)
    model = _model()
    prepared, optimizer = bench.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return _step(bench, prepared, optimizer, bench.accelerator.backward)


def _bare_step(bench: Bench, name: str) -> Callable[[], Any]:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model: Any = _model().to(bench.device)
    if name == "DDP":
        model = DistributedDataParallel(model)
    elif name == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh

        fully_shard(model, mesh=init_device_mesh(bench.device.type, (bench.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _step(bench, model, optimizer, lambda loss: loss.backward())


def _step(bench: Bench, model: Any, optimizer: Any, backward: Callable[[Any], Any]) -> Callable[[], Any]:
    import torch

    inputs = torch.ones(_BATCH, _WIDTH, device=bench.device)

    def step() -> None:
        backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def _model() -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int = 5) -> str:
    """Describe how long both take, measured in turns, because other work on the machine comes and goes."""
    pairs = [(_median_seconds(ours, repeat=5), _median_seconds(theirs, repeat=5)) for _ in range(rounds)]
    mine, bare = (median(column) for column in zip(*pairs, strict=True))
    ratio = median(one / other for one, other in pairs)
    return f"{mine * 1e3:.2f} ms, torch alone {bare * 1e3:.2f} ms ({ratio:.2f})"


def _median_seconds(work: Callable[[], Any], repeat: int) -> float:
    import torch

    times: list[float] = []
    for _ in range(2 + repeat):  # two to warm up
        start = time.perf_counter()
        work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[2:])


MEASUREMENTS: dict[str, Check] = {"all-reduce": all_reduce_speed, "matmul": matmul_speed}
COMPARISONS: dict[str, Check] = {
    "copies to the device": copy_speed,
    "collectives": collectives_and_torch,
    "steps": steps_and_torch,
}
"""What a report adds."""
