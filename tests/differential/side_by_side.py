"""Start the runner under both implementations, and say where what they observed differs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests import warm
from tests.warm import COLD

from .registry import WORLDS

REFERENCE = os.environ.get("MESHWRIGHT_REFERENCE_PYTHON")
ROOT = Path(__file__).parents[2]
PYTHONS = {"theirs": REFERENCE, "ours": sys.executable}
SECONDS = 300

Observed = dict[str, list[dict[str, Any]]]  # script -> what each rank recorded


def run_both(world: str, folder: Path, names: Sequence[str] = ()) -> dict[str, Observed]:
    """Run the scripts of a world under both, at the same time; a script that a rank did not reach is missing."""
    with ExitStack() as ended:
        started = {who: start(str(python), world, folder / who, names, ended) for who, python in PYTHONS.items()}
        for who, processes in started.items():
            for rank, process in enumerate(processes):
                try:
                    code = process.wait(timeout=SECONDS)
                except subprocess.TimeoutExpired:
                    code = None
                if code != 0:
                    log = (folder / who / f"log-{rank}.txt").read_text(encoding="utf-8", errors="replace")
                    print(f"{who}, rank {rank} of world {world!r} ended with {code}:\n{log[-3000:]}")
    return {who: read(folder / who, WORLDS[world]) for who in PYTHONS}


def start(
    python: str, world: str, folder: Path, names: Sequence[str], ended: ExitStack
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of one implementation; they end with the stack at the latest."""
    folder.mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended.callback(lambda: store)  # it serves the ranks until then
    processes = []
    for rank in range(WORLDS[world]):
        log = ended.enter_context((folder / f"log-{rank}.txt").open("wb"))
        process = warm.Popen(
            [python, "-m", "tests.differential.runner", world, str(folder), *names],
            # The commands of a world are found by the PATH that an interpreter's own start sets.
            env=environment(rank, WORLDS[world], store.port, folder / "home") | ({COLD: "1"} if world == "cli" else {}),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        ended.callback(process.kill)
        processes.append(process)
    return processes


def environment(rank: int, size: int, store_port: int, home: Path) -> dict[str, str]:
    """Return what a launcher would set for a rank on a machine without accelerators; nothing is read from home."""
    names = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    names |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    if size > 1:
        names |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        names |= {"MASTER_ADDR": "127.0.0.1", "DIFFERENTIAL_STORE_PORT": str(store_port)}
    return os.environ | names


def read(folder: Path, size: int) -> Observed:
    """Return the records of all ranks, by script."""
    records: Observed = {}
    for rank in range(size):
        observed = folder / f"observed-{rank}.jsonl"
        for line in observed.read_text(encoding="utf-8").splitlines() if observed.exists() else []:
            record = json.loads(line)
            records.setdefault(record["script"], []).append(record)
    return {script: ranks for script, ranks in records.items() if len(ranks) == size}


def differences(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, str]:
    """Return the observations that differ on any rank, each with the first place where it does."""
    found: dict[str, str] = {}
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if their.get("raised") != our.get("raised"):
            reasons = f"{their.get('from', 'theirs ended well')}\n{our.get('from', 'ours ended well')}"
            found["raised"] = f"rank {rank}: theirs {their.get('raised')}, ours {our.get('raised')}\n{reasons}"
            continue
        before, after = their.get("observed", {}), our.get("observed", {})
        for name in [*before, *(name for name in after if name not in before)]:
            where = next(disagreement(before.get(name), after.get(name)), None)
            if where is not None:
                found.setdefault(name, f"rank {rank}{where}")
    return found


def disagreement(theirs: Any, ours: Any, at: str = "") -> Iterator[str]:
    """Yield the places where two plain values differ; floats may, by one in a million."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and list(theirs) == list(ours):
        for key in theirs:
            yield from disagreement(theirs[key], ours[key], f"{at}.{key}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, pair in enumerate(zip(theirs, ours, strict=True)):
            yield from disagreement(*pair, f"{at}[{index}]")
    elif isinstance(theirs, float) and isinstance(ours, float):
        if not (math.isclose(theirs, ours, rel_tol=1e-6, abs_tol=1e-6) or (math.isnan(theirs) and math.isnan(ours))):
            yield f"{at}: theirs {theirs!r}, ours {ours!r}"
    elif type(theirs) is not type(ours) or theirs != ours:
        yield f"{at}: theirs {theirs!r}, ours {ours!r}"
