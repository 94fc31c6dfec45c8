"""A step under `meshwright launch --survive`, and one of the same script without the option, on 2 and 4 processes.

Both are launched and stay there; they take turns through a store, so that other load on the machine affects both.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from subprocess import STDOUT, Popen
from tempfile import TemporaryFile

from benchmarks.interleave import Comparison, Lap, compare
from benchmarks.venvs import REPOSITORY

TARGET = 1.01
STEPS_PER_LAP = 10
_STORE = "BENCHMARKS_STORE"
_SECONDS = timedelta(seconds=300)


def run(rounds: int) -> list[Comparison]:
    """Measure on 2 and on 4 processes, with gradients of 33 kB and of 32 MiB."""
    return [
        row(size, processes, rounds if size == "small" else max(2, rounds // 10))
        for processes in (2, 4)
        for size in ("small", "large")
    ]


def row(size: str, processes: int, rounds: int) -> Comparison:
    what = f"step with --survive / without{', 32 MiB of gradients' if size == 'large' else ''}, {processes} processes"
    with launched(size, processes) as bare, launched(size, processes, "--survive") as surviving:
        return compare(what, lambda: bare, lambda: surviving, rounds=rounds, target=TARGET)


@contextmanager
def launched(size: str, processes: int, *options: str) -> Iterator[Lap]:
    """Launch the script below; make a lap of it that lets it take some steps."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_SECONDS)
    variables = os.environ | {
        _STORE: str(store.port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "meshwright", "launch", "--cpu", *options]
    command += ["--num_processes", str(processes), "--module", "benchmarks.survive", size]
    said = TemporaryFile()  # noqa: SIM115
    launcher = Popen(command, env=variables, stdout=said, stderr=STDOUT)
    numbers = count()

    def lap() -> float:
        number = next(numbers)
        store.set(f"turn/{number}", "go")
        while not store.check([f"seconds/{number}"]):
            assert launcher.poll() is None, output()
            time.sleep(0.002)
        return float(store.get(f"seconds/{number}"))

    def output() -> str:
        said.seek(0)
        return said.read().decode()

    try:
        yield lap
        store.set(f"turn/{next(numbers)}", "end")
        assert launcher.wait(60) == 0, output()
    finally:
        launcher.terminate()
        launcher.wait()
        said.close()


def train(size: str) -> None:
    """Train for as many laps as are wanted, in every process of a launch."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.optim import SGD

    from benchmarks.replicas import large_model
    from benchmarks.task import loader, loss_of, model
    from meshwright import Accelerator

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", int(os.environ[_STORE]), wait_for_workers=False, timeout=_SECONDS)
    accelerator = Accelerator(cpu=True)
    net = model() if size == "small" else large_model()
    net, optimizer, batches = accelerator.prepare(net, SGD(net.parameters(), 1e-3), loader())
    if "MESHWRIGHT_MEMBERSHIP_STORE" in os.environ:
        accelerator.resume()

    def steps() -> Iterator[None]:
        while True:
            for inputs, labels in batches:
                accelerator.backward(loss_of(net(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
                yield

    endless = steps()
    for number in count():
        if store.get(f"turn/{number}") == b"end":
            return
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(STEPS_PER_LAP):
            next(endless)
        if accelerator.is_main_process:
            store.set(f"seconds/{number}", str((time.perf_counter() - begun) / STEPS_PER_LAP))


if __name__ == "__main__":
    train(sys.argv[1])
