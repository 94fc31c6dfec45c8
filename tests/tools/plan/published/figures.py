"""Print the figures of docs/plan_accuracy.md, except those of traces, which `harness` prints.

python -m tests.tools.plan.published.figures                  # all of them, half an hour
python -m tests.tools.plan.published.figures throughput       # errors of tokens per second, from shapes
python -m tests.tools.plan.published.figures meshes           # nanotron's meshes and rank correlations
python -m tests.tools.plan.published.figures sizes            # seconds and memory of three large plans
python -m tests.tools.plan.published.figures fits             # whether llm-foundry's runs are said to fit
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.commands.plan import FITS_NOT
from meshwright.runtime.devices.catalogue import DEVICES, load

from .analytic import Estimate
from .fits import foundry, planned
from .harness import OLDER_KERNELS, SCRIPT
from .meshes import BEST, cells, correlations
from .outcomes import table
from .rows import Case, read_cases
from .script.options import Options

_LLAMA_3 = {"vocab": 128256, "kv_heads": 8, "seq": 8192, "reshard": True}
SIZES = {
    "Llama 3 8B, FSDP": Options(**_LLAMA_3, layers=32, hidden=4096, heads=32, ffn=14336, dp_shard=8),
    "Llama 3 70B, FSDP, recomputed blocks": Options(
        **_LLAMA_3, layers=80, hidden=8192, heads=64, ffn=28672, dp_shard=256, recompute="full"
    ),
    "Llama 3.1 405B, FSDP 8 x tensor 8 x pipeline 8, 16 micro-batches": Options(
        **_LLAMA_3, layers=126, hidden=16384, heads=128, ffn=53248, dp_shard=8, tp=8, pp=8, accumulation=16, fused=True
    ),
}
"""Runs of H100 whose plans are timed."""


def is_timed(case: Case) -> bool:
    """Return whether the speed of a row can be estimated from shapes: meta tensors cannot be offloaded."""
    return case.options is not None and case.rate is not None and not case.options.offload


def rate_of(case: Case, devices: Path = DEVICES) -> float:
    """Return tokens per second and device. nanotron divides pipelines by work."""
    assert case.options is not None
    cluster = load(devices).cluster(case.cluster)
    return Estimate(case.options, cluster, case.compiled, balanced=case.source == "nanotron").rate


def is_inside(case: Case, error: float) -> bool:
    """Return whether the measured seconds are in the interval of a plan."""
    interval = load().cluster(case.cluster).interval
    return interval.low <= 1 + error <= interval.high


def throughput(cache: Path) -> None:
    """Print errors of tokens per second, with attention kernels of today for all rows and with older ones."""
    cases = [case for case in read_cases() if is_timed(case)]
    older = {True: OLDER_KERNELS, False: DEVICES}
    for title, sources in (("kernels of today", ()), ("older kernels for llm-foundry", ("llm-foundry",))):
        rates = [(case, rate_of(case, older[case.source in sources])) for case in cases]
        errors = [(case, rate / case.rate - 1) for case, rate in rates if case.rate is not None]
        print("", table(f"tokens per second, {title}", errors), "", sep="\n")
        for source in ("", *dict.fromkeys(case.source for case in cases)):
            held = [is_inside(*each) for each in errors if each[0].held_out and source in ("", each[0].source)]
            print(f"held-out rows inside of their interval{source and f', {source}'}: {sum(held)} of {len(held)}")
        far = sorted(errors, key=lambda item: -abs(item[1]))[:12]
        print("largest:", *(f"{case.cluster} {case.label[:50]} {error:+.0%}" for case, error in far), sep="\n  ")


def meshes(cache: Path) -> None:
    """Print where nanotron's meshes are among ours, and the rank correlations."""
    for balanced in (True, False):
        found = []
        for cell in cells(balanced=balanced):
            print(cell, flush=True)
            found.append(cell.found)
        rates, utilisations = correlations(balanced=balanced)
        print(f"stages {'of equal work' if balanced else 'of equal blocks'}:")
        print(f"nanotron's mesh is among our {BEST} fastest: {sum(found)} of {len(found)}")
        print(f"rank correlation: tokens per second {rates:.2f}, FLOPs utilisation {utilisations:.2f}", flush=True)


def sizes(cache: Path) -> None:
    """Print how long `meshwright plan` takes for large models, and the memory of its largest process."""
    print("| model | devices | seconds | of the processor | memory |\n| --- | --- | ---: | ---: | ---: |")
    for name, options in SIZES.items():
        began = time.monotonic()
        command = ["-m", "meshwright", "plan", "--gpus", f"{options.world_size}xH100"]
        words = [sys.executable, *command, str(SCRIPT), "--options", options.to_json()]
        silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        child = os.posix_spawn(sys.executable, words, os.environ, file_actions=silent)
        _, status, usage = os.wait4(child, 0)
        seconds = time.monotonic() - began
        if os.waitstatus_to_exitcode(status) not in (0, FITS_NOT):
            raise RuntimeError(f"{name} was not planned.")
        memory = f"{usage.ru_maxrss / 2**20:.2f} GiB"
        computing = usage.ru_utime + usage.ru_stime
        print(f"| {name} | {options.world_size} H100 | {seconds:.0f} | {computing:.0f} | {memory} |", flush=True)


def fits(cache: Path) -> None:
    """Print whether llm-foundry's runs, all of which ran, are planned to fit."""
    runs = foundry()
    fit = full = 0
    for each in planned(runs, cache):
        fit, full = (fit + 1 + len(each.followers), full) if each.fits else (fit, full + 1)
        print(each, f"| {fit} of {len(runs)} fit or need no more than one that fits, {full} do not", flush=True)


PARTS: dict[str, Callable[[Path], None]] = {"throughput": throughput, "meshes": meshes, "sizes": sizes, "fits": fits}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them by default")
    parser.add_argument("--cache", type=Path, help="keep traces in this folder")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        cache = args.cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        for name in args.parts or PARTS:
            PARTS[name](cache)


if __name__ == "__main__":
    main()
