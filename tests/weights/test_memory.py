"""A pass over the weights takes less than two buckets beside the model, on every mesh."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.ranks import run_on_ranks
from tests.sizes import at_night

MIB = 1 << 20
BUCKET = 16 * MIB
_M_MMAP_THRESHOLD = -3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 2048), nn.Linear(2048, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


class Large(nn.Module):
    """The embedding fills a bucket, and each layer one more."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4096, 1024)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(1024, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MESHES: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "ddp": (2, dict),
    "fsdp": (2, lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()}),
    "fsdp on the host": (2, lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)}),
    "tp": (2, lambda: {"parallelism_config": ParallelismConfig(tp_size=2, tp_plan=PLAN)}),
    "pp": (2, lambda: {"parallelism_config": ParallelismConfig(pp_size=2)}),
    "hsdp": (4, lambda: {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}),
    "fsdp x tp": (
        4,
        lambda: {"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2, tp_plan=PLAN)},
    ),
    "pp x fsdp": (4, lambda: {"parallelism_config": ParallelismConfig(pp_size=2, dp_shard_size=2)}),
}


def resident(peak: bool = False) -> int:
    """Return the memory of this process, now or at most since `forget_peak()`."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def extra_memory(mesh: str) -> float:
    """Return the peak of a pass beside what was there before, in buckets."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB // 16)  # what is freed goes back to the system
    accelerator = Accelerator(cpu=True, **MESHES[mesh][1]())
    net = Large()
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weights = accelerator.weights(net, bucket_size=BUCKET)
    assert sum(tensor.numel() for _, tensor in weights) > 24 * MIB, "the first pass makes groups and plans"
    before = resident()
    forget_peak()
    for _name, _tensor in weights:
        pass
    return (resident(peak=True) - before) / BUCKET


@pytest.mark.parametrize(
    "mesh", ["fsdp", "tp", "pp", *(at_night(mesh) for mesh in MESHES if mesh not in ("fsdp", "tp", "pp"))]
)
def test_a_pass_takes_less_than_two_buckets_beside_the_model(mesh: str) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak is read from /proc of Linux")
    assert max(run_on_ranks(MESHES[mesh][0], extra_memory, mesh=mesh)) <= 2.0
