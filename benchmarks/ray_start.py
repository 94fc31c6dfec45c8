"""How soon two workers on a running Ray cluster have done their first collective: `ray_launcher` beside Ray Train.

    python -m benchmarks.ray_start --rounds 10 [--address ADDRESS]

It needs `ray[train]`. Without an address it starts a cluster on this machine. Both sides get the same cluster, the same
resources and gloo; they take turns, and each pair begins with another one. The clock starts with the call of the
launcher in the driver and stops when rank 0 has the sum of all ranks. The second number is the whole call, with the end
of the workers.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

WORKERS = 2


def with_ours(file: str) -> None:
    """Run the first collective under `ray_launcher`."""
    from meshwright import ray_launcher

    def work(file: str) -> None:
        import torch

        from meshwright import Accelerator

        accelerator = Accelerator()
        assert accelerator.reduce(torch.ones(1)).item() == WORKERS
        if accelerator.is_main_process:
            Path(file).write_text(str(time.time()))

    ray_launcher(work, (file,), num_workers=WORKERS, resources_per_worker={"CPU": 1})


def with_ray_train(file: str) -> None:
    """Run the first collective under `TorchTrainer`."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def work() -> None:
        import torch
        import torch.distributed as dist

        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == WORKERS
        if dist.get_rank() == 0:
            Path(file).write_text(str(time.time()))

    scaling = ScalingConfig(num_workers=WORKERS, use_gpu=False, resources_per_worker={"CPU": 1})
    TorchTrainer(work, scaling_config=scaling, run_config=RunConfig(storage_path=str(Path(file).parent))).fit()


def measure(start: Callable[[str], None]) -> tuple[float, float]:
    """Return the seconds to the first collective, and of the whole call."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "time"
        began = time.time()
        start(str(file))
        return float(file.read_text()) - began, time.time() - began


def main() -> None:
    """Print the seconds of both sides and the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--address", help="of a running cluster with 3 free CPUs")
    options = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"}
    import ray

    own = {} if options.address else {"num_cpus": WORKERS + 1, "include_dashboard": False}
    ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR, **own)
    sides = {"ours": with_ours, "Ray Train": with_ray_train}
    for start in sides.values():  # compiles and caches what each side imports
        measure(start)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(options.rounds):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            taken[name].append(measure(sides[name]))
            print(f"{turn} {name}: {taken[name][-1][0]:.2f} s, whole call {taken[name][-1][1]:.2f} s", flush=True)
    for index, what in enumerate(("first collective", "whole call")):
        ours, train = ([pair[index] for pair in taken[name]] for name in sides)
        ratios = sorted(mine / theirs for mine, theirs in zip(ours, train, strict=True))
        print(
            f"{what}: ours {median(ours):.2f} s, Ray Train {median(train):.2f} s (medians); ratio {median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
