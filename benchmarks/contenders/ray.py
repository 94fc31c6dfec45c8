"""Ray Train: a cluster of one machine, and two workers of its `TorchTrainer`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..interleave import Comparison
from .bare import accumulating, full_precision

DISTRIBUTION = "ray"
IMPORT = "from ray.train.torch import TorchTrainer"
CONSTRUCT = None  # its first object starts a cluster: that is part of `launch`
ANSWERS: dict[str, list[object]] = {}


def run_on_two(benchmark: Callable[[int], list[Comparison]], rounds: int) -> list[Comparison]:
    """Run the benchmark in two workers, and return what rank 0 measured."""

    def worker() -> None:
        torch.set_num_threads(1)
        rows = benchmark(rounds)
        if ray.train.get_context().get_world_rank() == 0:
            answer.write_text(json.dumps([asdict(row) for row in rows]))

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        fit(worker, 2, folder)
        return [Comparison(**row) for row in json.loads(answer.read_text())]


def fit(worker: Callable[[], None], processes: int, folder: str) -> None:
    """Start a cluster and let this many workers run."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    variables = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ray.init(
        num_cpus=processes + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**27,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": variables | {"BENCHMARKS_CONTENDER": "ray"}},
    )
    scaling = ScalingConfig(num_workers=processes, use_gpu=False)
    TorchTrainer(worker, scaling_config=scaling, run_config=RunConfig(storage_path=folder)).fit()
    ray.shutdown()


def steps(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any], precision: str = "no") -> Iterator[None]:
    """Train for ever; yield after every step."""
    return full_precision(prepare_model(net), optimizer, prepare_data_loader(batches))


def windows(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    """Accumulate for ever; yield after every window."""
    return accumulating(prepare_model(net), optimizer, prepare_data_loader(batches))


def launch(script: Path, processes: int, folder: Path) -> list[object] | None:
    """Start a cluster whose workers run the script; one process needs none."""
    if processes == 1:
        return None
    return [sys.executable, "-m", __name__, script, processes, folder]


if __name__ == "__main__":
    program = Path(sys.argv[1]).read_text()
    fit(lambda: exec(program), int(sys.argv[2]), sys.argv[3])
