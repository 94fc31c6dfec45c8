"""A training loop in which one rank goes wrong in a chosen way: `faults.py KIND RANK`."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from meshwright import Accelerator, PartialState

KIND, CULPRIT = sys.argv[1], int(sys.argv[2])


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == 11:
            raise IndexError(f"sample {index} is broken")
        return index


def go_wrong() -> None:
    if KIND == "late":
        time.sleep(1.5)  # the others are inside the collective by then
    Path("fault_time").write_text(str(time.time()))
    match KIND:
        case "exception" | "everywhere":
            raise ValueError("the label 17 is out of range")
        case "late":
            raise KeyError("missing")
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), 9)
        case "crash":
            ctypes.string_at(0)
        case "memory":
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1 << 20) * 64))
        case "import":
            import a_module_that_does_not_exist  # noqa: F401
        case "stuck":
            PartialState().wait_for_everyone()
        case "worker":
            list(DataLoader(Samples(), num_workers=1))


def main() -> None:
    accelerator = Accelerator()
    for step in range(400):
        if step == 3 and (accelerator.process_index == CULPRIT or KIND in ("everywhere", "import")):
            go_wrong()
        accelerator.reduce(torch.ones(8))
        time.sleep(0.02)


if __name__ == "__main__":
    main()
