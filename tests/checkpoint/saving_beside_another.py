"""A run that saves automatic checkpoints while another one does, in the same folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.checkpoint.runs import StampedRun

if __name__ == "__main__":
    folder, own, other = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run = StampedRun(folder, project_options={"total_limit": None})
    (folder / f"ready_{own}").touch()
    while not (folder / f"ready_{other}").exists():
        time.sleep(0.001)
    stamps = {}
    for number in range(5):
        run.stamp(5 * own + number)
        stamps[run.accelerator.save_state(wait=number % 2 == 0)] = 5 * own + number
    run.accelerator.end_training()
    print(json.dumps(stamps))
