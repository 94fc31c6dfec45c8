"""Does this package work with this Python and this torch? Every module, and one training in many ways.

    python tests/versions/smoke.py

It needs the package's own dependencies and nothing else, prints a line per check, and exits with 1 if one failed. The
numbers of every training are compared with those of one process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import platform
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import symbols
import torch
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader, TensorDataset

import accelerate
from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    ProjectConfiguration,
    broadcast_object_list,
)

GLOBAL_BATCH, LENGTH, WIDTH, STEPS = 8, 8, 16, 6
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

torch.set_num_threads(1)  # also because processes are forked below, which a pool of threads would not survive


class Block(nn.Module):
    """Tokens do not see each other: torch's attention over parts of a sequence has no kernel for CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, LENGTH, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs.sum(2, keepdim=True))


def prepared(folder: str | None = None, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=folder is not None)
    accelerator = Accelerator(cpu=True, project_config=project, **options)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes = options.get("parallelism_config")
    sharers = accelerator.num_processes if sizes is None else sizes.data_parallel_size
    torch.manual_seed(2)
    loader = DataLoader(data(), batch_size=GLOBAL_BATCH // sharers, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def go_on(accelerator: Accelerator, model: Any, optimizer: Any, batches: Iterable[Any], steps: int) -> list[float]:
    """Train for some steps, and return the loss of each over all processes."""
    losses = []
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        with accelerator.maybe_context_parallel(buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def losses_of(steps: int = STEPS, **options: Any) -> list[float]:
    accelerator, *parts = prepared(**options)
    try:
        return go_on(accelerator, *parts, steps)
    finally:
        accelerator.free_memory()


# --- the checks -------------------------------------------------------------------------------------------------------

outcomes: list[bool] = []


@contextmanager
def check(name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
        outcome = "ok"
    except Exception:
        traceback.print_exc()
        outcome = "FAILED"
    outcomes.append(outcome == "ok")
    if os.environ.get("RANK", "0") == "0":
        print(f"{outcome:7}{name} ({time.perf_counter() - start:.1f} s)", flush=True)


def require_near(found: list[float], expected: list[float], tolerance: float = 1e-5) -> None:
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    if not max(differences) <= tolerance:
        raise AssertionError(f"found the losses {found}, expected {expected}")


def import_everything() -> None:
    for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if (
            module.name != "accelerate.utils.rich" or importlib.util.find_spec("rich") is not None
        ):  # which it needs, as published
            importlib.import_module(module.name)


def find_every_name_of_torch() -> None:
    if missing := symbols.missing():
        raise AssertionError(f"torch {torch.__version__} has no {', '.join(missing)}")
    caches = symbols.missing_caches()
    if len(caches) > (4 if torch.__version__.startswith("2.9.") else 2):
        raise AssertionError(f"torch {torch.__version__} has no {', '.join(caches)}: accelerate/config/meshes.py")


def resume_equals_going_on(**options: Any) -> None:
    """Save in the middle of an epoch; a new model that resumes there goes on bitwise as the first one did."""
    with tempfile.TemporaryDirectory() as own:
        PartialState(cpu=True)
        [folder] = broadcast_object_list([own])
        accelerator, model, optimizer, loader = prepared(folder, **options)
        batches = iter(loader)
        go_on(accelerator, model, optimizer, batches, STEPS // 2)
        accelerator.save_state()
        expected = go_on(accelerator, model, optimizer, batches, STEPS // 2)
        accelerator, *parts = prepared(folder, **options)
        accelerator.resume()
        require_near(go_on(accelerator, *parts, STEPS // 2), expected, 0.0)
        accelerator.wait_for_everyone()


def ways_on_two_ranks() -> dict[str, dict[str, Any]]:
    return {
        "DDP": {},
        "FSDP2": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "tensor parallelism": {"parallelism_config": ParallelismConfig(tp_size=2, tp_plan=TP_PLAN)},
        "context parallelism": {"parallelism_config": ParallelismConfig(cp_size=2)},
    }


def on_two_ranks(alone: list[float], names: list[str]) -> None:
    for name, options in ways_on_two_ranks().items():
        if name in names:
            with check(f"2 ranks, {name}: the losses of one process"):
                require_near(losses_of(**options), alone)
    for name in ("DDP", "FSDP2"):
        if f"resume {name}" in names:
            with check(f"2 ranks, {name}: save and resume"):
                resume_equals_going_on(**ways_on_two_ranks()[name])


def on_eight_ranks(rank: int, port: int, alone: list[float]) -> None:
    """Two steps on a mesh of three axes, of which two shard."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    require_near(losses_of(parallelism_config=mesh, steps=2), alone[:2])
    Accelerator().end_training()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launched(name: str, *command: str) -> None:
    """Run this file on ranks; its lines are printed as they come."""
    with check(name):
        ended = subprocess.run([sys.executable, *command], timeout=300, check=False)
        if ended.returncode:
            raise AssertionError(f"exit code {ended.returncode}")


def main() -> int:
    begin = time.perf_counter()
    os.environ["HF_HOME"] = os.devnull  # no config file of this machine's user
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {accelerate.__file__}", flush=True)
    with check("import every module"):
        import_everything()
    with check("every name of torch that is used"):
        find_every_name_of_torch()
    alone: list[float] = []
    with check("1 process: training, save and resume"):
        alone += losses_of()
        resume_equals_going_on()
    if alone:
        everything = [*ways_on_two_ranks(), "resume DDP", "resume FSDP2"]
        launch = ("-m", "meshwright.commands.launch", "--cpu", "--num_processes", "2")
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        launched("2 ranks by meshwright launch", *launch, __file__, json.dumps([alone, everything]))
        if os.environ.get("MESHWRIGHT_TEST_PROFILE") == "nightly":
            program = ("-m", "meshwright")
            launched("meshwright env", *program, "env")
            launched("meshwright test", *program, "test", "--cpu", "--num_processes", "2")
            launched("2 ranks by torchrun", *torchrun, __file__, json.dumps([alone, ["DDP"]]))
        with check("8 ranks, dp_replicate x dp_shard x cp: the losses of one process"):
            PartialState._reset_state()
            start_processes(on_eight_ranks, (free_port(), alone), nprocs=8, start_method="fork")
    failed = outcomes.count(False)
    seconds = time.perf_counter() - begin
    print(f"{'FAILED' if failed else 'passed'}: {len(outcomes)} checks, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


def on_ranks(argument: str) -> int:
    on_two_ranks(*json.loads(argument))
    Accelerator().end_training()
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(on_ranks(sys.argv[1]) if len(sys.argv) > 1 else main())
