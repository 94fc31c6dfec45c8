"""Compiling twelve equal blocks one by one, in terms of compiling the whole model.

Every measurement is a fresh interpreter with empty caches that trains one step: the first step compiles. What a later
step costs is taken off. The clock is that of CPU time, with the C++ compilers that were started: what other processes
do cancels out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from .interleave import Comparison

ROUNDS_PER_COMPILATION = 300
DEPTH, WIDTH = 12, 64
TARGET = 0.35


class Block(nn.Module):
    """A gated layer with a residual: enough for some kernels, and a class that the compiler does not skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the gate lets through."""
        y = self.norm(x)
        out: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return out


class Blocks(nn.Module):
    """Equal blocks between an input and an output layer."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run through all blocks."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What one compilation took, and what came out of the model."""

    seconds: float
    checksum: float


def run(rounds: int) -> list[Comparison]:
    """Measure whole and by regions, in turn, with inductor where there is a C++ compiler."""
    backend = "inductor" if _has_compiler() else "aot_eager"
    times = 1 + rounds // ROUNDS_PER_COMPILATION
    pairs = [(measured(backend, regional=False), measured(backend, regional=True)) for _ in range(times)]
    row = Comparison(
        f"compile {DEPTH} blocks one by one, not whole ({backend})",
        [(whole.seconds, regions.seconds) for whole, regions in pairs],
        TARGET,
    )
    difference = max(abs(whole.checksum - regions.checksum) for whole, regions in pairs)
    return [replace(row, notes=[f"largest difference of the mean outputs: {difference:.1e}"])]


def measured(backend: str, *, regional: bool) -> Compilation:
    """Compile in a fresh interpreter with caches of its own."""
    with tempfile.TemporaryDirectory() as folder:
        # One compile thread: then the C++ compilers are children of that interpreter, which counts their time.
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", __name__, backend, str(int(regional))]
        answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Compilation(**json.loads(answer.splitlines()[-1]))


def compile_once(backend: str, regional: bool) -> Compilation:
    """Prepare and train a step, twice: the difference is what compiling took."""
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    torch.set_num_threads(1)
    torch.compile(nn.Linear(2, 2), backend=backend)(torch.randn(2, 2)).sum().backward()  # loads the compiler itself
    torch.manual_seed(0)
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Blocks(DEPTH, WIDTH))
    inputs = torch.randn(8, WIDTH)

    def step() -> tuple[float, Tensor]:
        begin = _seconds_of_cpu()
        outputs: Tensor = model(inputs)
        outputs.square().mean().backward()  # type: ignore[no-untyped-call]
        return _seconds_of_cpu() - begin, outputs

    first, outputs = step()
    later, _ = step()
    return Compilation(seconds=first - later, checksum=outputs.abs().mean().item())


def _seconds_of_cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:  # torch says in its own way that there is none
        return False


if __name__ == "__main__":
    print(json.dumps(asdict(compile_once(sys.argv[1], bool(int(sys.argv[2]))))))
