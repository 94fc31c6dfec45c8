"""Run a script and count the bytes of its real storages: the peak of this rank goes to a file.

python counted.py FOLDER SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counter(TorchDispatchMode):
    """Count what is allocated, from the first time that a storage is seen until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._live: dict[int, tuple[int, Any]] = {}
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = plain(storage, size)
            if storage._cdata in self._live:
                self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:  # torch's own planning
            for leaf in tree_leaves(result):
                if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "cpu":
                    self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        before, reference = self._live.get(key, (0, None))
        self._live[key] = size, reference or weakref.ref(storage, lambda _: self._free(key))
        self._now += size - before
        self.peak = max(self.peak, self._now)

    def _free(self, key: int) -> None:
        self._now -= self._live.pop(key)[0]


if __name__ == "__main__":
    folder, sys.argv = Path(sys.argv[1]), sys.argv[2:]
    torch.autograd.set_multithreading_enabled(False)  # modes are of one thread
    counter = Counter()
    with counter:
        runpy.run_path(sys.argv[0], run_name="__main__")
    (folder / os.environ.get("RANK", "0")).write_text(str(counter.peak))
