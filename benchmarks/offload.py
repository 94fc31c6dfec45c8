"""Models larger than memory: computing with all weights on disk, and loading a checkpoint in shards.

Times are in terms of the same forward pass with all weights in memory, and of reading the files' bytes; the page cache
is warm on both sides, but for one row, whose files leave the cache before each measurement. Memory is what the kernel
counts as resident, at its highest, above what it was before.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import disk_offload, init_empty_weights
from accelerate.utils import load_checkpoint_in_model

from .interleave import Comparison

LAYERS, WIDTH, ROWS = 32, 2048, 64
"""512 MB of weights in layers of 16 MB."""
LOADED_LAYERS, SHARDS = 128, 8
"""2 GB of weights, for what loads them from shards."""
ROUNDS_PER_LAP = 15
EVERYTHING_ON_CPU = {"": "cpu"}  # accelerate 1.15 cannot load without a map where there is no process group


def make_model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).eval()


def write_shards(model: nn.Module, folder: Path, shards: int) -> None:
    """Write the weights as transformers does: files of equal size, and an index that says where each weight is."""
    folder.mkdir()
    weights = model.state_dict()
    index: dict[str, str] = {}
    for number in range(shards):
        names = list(weights)[len(weights) * number // shards : len(weights) * (number + 1) // shards]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    size = sum(weight.nbytes for weight in weights.values())
    content = {"metadata": {"total_size": size}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def run(rounds: int) -> list[Comparison]:
    """Measure time in this process, and memory in fresh ones."""
    laps = 4 + rounds // ROUNDS_PER_LAP
    with tempfile.TemporaryDirectory() as folder:
        write_shards(make_model(LOADED_LAYERS), Path(folder) / "shards", SHARDS)
        return [
            *_forward(Path(folder), laps),
            _in_a_fresh_process(
                "memory_of_forward", folder, "peak memory, forward from disk / two layers, activations"
            ),
            _load(Path(folder), laps),
            _in_a_fresh_process("memory_of_load", folder, "peak memory, load / model + one shard"),
        ]


def _forward(folder: Path, laps: int) -> list[Comparison]:
    model, inputs = make_model(LAYERS), torch.randn(ROWS, WIDTH)
    on_disk = make_model(LAYERS)
    on_disk.load_state_dict(model.state_dict())
    disk_offload(on_disk, folder / "offload", execution_device="cpu")
    with torch.no_grad():
        assert torch.equal(on_disk(inputs), model(inputs))
        costs = _alternate(lambda: model(inputs), lambda: on_disk(inputs), laps)
        cold = _from_a_cold_cache(folder / "offload", lambda: model(inputs), lambda: on_disk(inputs), laps // 2)
    return [
        Comparison("forward with all weights on disk / plain forward", costs, 1.25),
        Comparison("the same, cold cache / the longer of plain forward and reading", cold, 1.25),
    ]


def _from_a_cold_cache(
    files: Path, plain: Callable[[], object], ours: Callable[[], object], laps: int
) -> list[tuple[float, float]]:
    """Time a pass whose weights are not in memory against whatever of its two parts takes longer."""
    costs: list[tuple[float, float]] = []
    for _ in range(laps + 1):
        _leave_cache(files)
        reading = _seconds(lambda: _read(files))
        computing = _seconds(plain)
        _leave_cache(files)
        costs.append((max(reading, computing), _seconds(ours)))
    return costs[1:]


def _leave_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(folder: Path) -> None:
    buffer = bytearray(4 << 20)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def touch(model: nn.Module) -> None:
    """Read something of every page: accelerate 1.15 only maps the files, and would not have loaded anything yet."""
    for parameter in model.parameters():
        parameter.detach().view(-1)[::1024].sum()


def _load(folder: Path, laps: int) -> Comparison:
    shards = folder / "shards"
    with init_empty_weights():
        empty = make_model(LOADED_LAYERS)

    def read() -> None:
        _ = [path.read_bytes() for path in shards.iterdir()]  # all are kept, as the model keeps its weights

    def load() -> None:
        model = copy.deepcopy(empty)
        load_checkpoint_in_model(model, shards, device_map=EVERYTHING_ON_CPU)
        touch(model)

    costs = _alternate(read, load, laps)
    return Comparison("load_checkpoint_in_model / reading the same bytes", costs, 1.5)


def _alternate(bare: Callable[[], object], ours: Callable[[], object], laps: int) -> list[tuple[float, float]]:
    """Time both sides in turn, each of them first in every other lap; the first two laps warm up."""
    costs: list[tuple[float, float]] = []
    for lap in range(laps + 2):
        times = {side: _seconds(side) for side in ((bare, ours) if lap % 2 else (ours, bare))}
        costs.append((times[bare], times[ours]))
    return costs[2:]


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


# --- Memory -----------------------------------------------------------------------------------------------------------


def _in_a_fresh_process(what: str, folder: str, row: str) -> Comparison:
    """Compare the memory that a process took with what it should; the columns are in MB."""
    command = [sys.executable, "-m", "benchmarks.offload", what, folder]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    expected, measured = json.loads(answer.splitlines()[-1])
    target = 1.3 if what == "memory_of_forward" else 1.05
    notes = [f"{measured / 1e6:,.1f} MB of {expected / 1e6:,.1f} MB"]
    return Comparison(row, [(expected * 1e-12, measured * 1e-12)], target, notes)


def memory_of_forward(folder: str) -> tuple[int, int]:
    """Return the bytes of two layers and the activations, and those taken by forward passes from disk."""
    with init_empty_weights():
        model = make_model(LAYERS)
    index = Path(folder) / "offload"
    disk_offload(model, index, execution_device="cpu")
    inputs = torch.randn(ROWS, WIDTH)
    weight = torch.randn(WIDTH, WIDTH)
    torch.nn.functional.linear(inputs, weight)  # torch's own buffers
    del weight
    before = resident()
    forget_peak()
    with torch.no_grad():
        for _ in range(3):
            model(inputs)
    return 2 * WIDTH * (WIDTH + 1) * 4 + 2 * inputs.nbytes, peak() - before


def memory_of_load(folder: str) -> tuple[int, int]:
    """Return the bytes of the model and a shard, and those taken by loading it."""
    with init_empty_weights():
        model = make_model(LOADED_LAYERS)
    load_checkpoint_in_model(nn.Linear(1, 1), _tiny(folder), device_map=EVERYTHING_ON_CPU)  # imports
    before = resident()
    forget_peak()
    load_checkpoint_in_model(model, Path(folder) / "shards", device_map=EVERYTHING_ON_CPU)
    touch(model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    return size + size // SHARDS, peak() - before


def _tiny(folder: str) -> Path:
    path = Path(folder) / "tiny"
    write_shards(nn.Linear(1, 1), path, 1)
    return path


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that were in memory since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    print(
        json.dumps({"memory_of_forward": memory_of_forward, "memory_of_load": memory_of_load}[sys.argv[1]](sys.argv[2]))
    )
