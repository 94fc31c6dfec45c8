"""Trace a script that a test writes, in a forked child: what planning replaces is global to a process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from textwrap import dedent

from meshwright.launch.processes.forked import Failure, World, run_several
from meshwright.tools.plan.trace import Trace, read_trace
from meshwright.tools.plan.tracing.script import TraceRequest, trace_script

BEGINNING = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from meshwright import Accelerator
accelerator = Accelerator(cpu=True)
"""
LOOP = """
for batch in loader:
    loss = model(batch).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def trace_of(source: str, folder: Path, *, world_size: int = 2, blocks: int | None = None) -> Trace:
    """Return the trace of rank 0; fails with the output of a script that does not come to its second step."""
    failure, output = run(source, folder, world_size, blocks)
    assert failure is None, failure.log
    assert output.exists(), (folder / "rank_0.log").read_text()
    return read_trace(output)


def printed_by(source: str, folder: Path) -> list[str]:
    """Return the lines that a script prints that ends before its second step."""
    file = folder / "printed"
    printing = f"""
import functools
print = functools.partial(print, file=open({str(file)!r}, "a"), flush=True)
"""
    failure, _ = run(printing + dedent(source), folder, 1, None)
    assert failure is None, failure.log
    return file.read_text().splitlines()


def run(source: str, folder: Path, world_size: int, blocks: int | None) -> tuple[Failure | None, Path]:
    """Run a script on fake tensors; return how it failed, and where its trace is."""
    script, output = folder / "train.py", folder / "trace"
    script.write_text(BEGINNING + dedent(source))
    request = TraceRequest(
        rank=0, world_size=world_size, output=output, blocks=None if blocks is None else (blocks, blocks)
    )
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "MESHWRIGHT_FIRST_STEPS": "off",  # as a plan has it
    }
    world = World(
        script=[str(script)],
        as_module=False,
        processes=1,
        port=1,
        variables=variables,
        folder=folder,
        before=partial(trace_script, request),
    )
    return run_several([world], 60.0, 1)[0], output
