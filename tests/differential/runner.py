"""Run the scripts of one world, one after the other, each as if its process were new.

    python -m tests.differential.runner WORLD FOLDER [SCRIPT ...]

It is started once per rank, by the python of accelerate 1.15 or by ours. Rank r writes one line of JSON per script to
`FOLDER/observed-r.jsonl`. Every script finds a launched process: it opens its process group itself, at its own port,
and nothing of the scripts before is left. Between scripts the ranks meet at the store behind DIFFERENTIAL_STORE_PORT.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks.pool import free_port

from .registry import WORLDS, Observer, Script, all_scripts, published_type


def main() -> None:
    """Run what the command line asks for."""
    world, folder, *names = sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    rendezvous = Rendezvous(WORLDS[world], rank)
    before = dict(os.environ)
    scripts = [script for script in all_scripts() if world in script.worlds and (not names or script.name in names)]
    with Path(folder, f"observed-{rank}.jsonl").open("w", encoding="utf-8") as output:
        for attempt, script in enumerate(scripts):
            place = Path(folder, script.name)
            place.mkdir(parents=True, exist_ok=True)
            os.chdir(place)
            if rendezvous.size > 1:
                os.environ["MASTER_PORT"] = rendezvous.port(f"port/{attempt}")
            start = time.perf_counter()
            record = run(script, seed=1000 + rank)
            forget_everything()
            os.environ.clear()
            os.environ.update(before)
            record["seconds"] = time.perf_counter() - start
            print(json.dumps(record), file=output, flush=True)
            rendezvous.wait(str(attempt))


def run(script: Script, seed: int) -> dict[str, Any]:
    """Run one script and return what it observed, and how it ended."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    observe = Observer()
    try:
        script.body(observe)
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would break those that are still talking
    except Exception as error:
        # The other ranks stop as well: this one is about to close its connections.
        return {"script": script.name, "raised": published_type(error), "from": told(error)}
    return {"script": script.name, "observed": observe.seen}


def told(error: Exception) -> str:
    """Return the line of the script at which an error came out, and its message; nothing from inside a library."""
    here = [frame for frame in traceback.extract_tb(error.__traceback__) if "differential/scripts" in frame.filename]
    lines = [f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in here]
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])


def forget_everything() -> None:
    """Close process groups and drop the state of the library."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()


class Rendezvous:
    """Where ranks wait for each other between scripts, outside any process group."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        if size > 1:
            port = int(os.environ["DIFFERENTIAL_STORE_PORT"])
            self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))

    def wait(self, name: str) -> None:
        """Return when all ranks are here."""
        if self.size > 1:
            if self.store.add(f"arrived/{name}", 1) == self.size:
                self.store.set(f"all/{name}", "")
            self.store.wait([f"all/{name}"])

    def port(self, name: str) -> str:
        """Return a free port that rank 0 chose."""
        if self.rank == 0:
            self.store.set(name, str(free_port()))
        return str(self.store.get(name).decode())


if __name__ == "__main__":
    from tests.differential import runner

    runner.main()
