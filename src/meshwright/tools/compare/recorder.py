"""Record the first steps of a script, then end it. `meshwright compare` copies this file to be a `sitecustomize.py`.

It needs nothing but torch, and waits until the script imports it: it sees the same things under every `accelerate`.
Each rank writes lines of JSON beside this file; `records.py` reads them.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import resource
import sys
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

SETTINGS = "settings.json"
RECORDS = "records"
PARAMETERS = "parameters.pt"
_MOST_PARAMETER_BYTES = 2 << 30
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class AfterTorch:
    """A finder that starts the recorder when torch has been imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return torch's spec, as the other finders have it, with a loader that starts the recorder at its end."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_record(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                RunRecorder(self._folder).start()

        loader.exec_module = execute_and_record
        return spec


class RunRecorder:
    """Note every loss, gradient norm, learning rate and batch of this process until the last step."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        self._steps: int = settings["steps"]
        self._seed: int | None = settings["seed"]
        self._folder = folder / RECORDS
        self._stream: Any = None
        self._process = os.getpid()
        self._done = 0
        self._has_ended = False
        self._losses: list[torch.Tensor] = []
        self._batches: list[tuple[int, int, int]] = []
        self._iterators: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._iterators_seen = 0
        self._schedulers: list[weakref.ref[Any]] = []
        self._gradient_norm = 0.0
        self._rates: list[float] = []
        self._seconds = 0.0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Put the recorder into torch's own functions."""
        import torch
        from torch.optim.lr_scheduler import LRScheduler
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import dataloader

        if self._seed is not None:
            random.seed(self._seed)
            torch.manual_seed(self._seed)
            with suppress(ImportError):
                import numpy

                numpy.random.seed(self._seed)
        torch.autograd.backward = self._recording_backward(torch.autograd.backward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        iterator: Any = dataloader._BaseDataLoaderIter
        iterator.__next__ = self._recording_next(iterator.__next__)
        scheduler: Any = LRScheduler
        scheduler.__init__ = self._noting_schedulers(scheduler.__init__)
        atexit.register(self._end)

    def _recording_backward(self, backward: Any) -> Any:
        @wraps(backward)
        def record_and_call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(tensors, "numel", int)() == 1:
                self._losses.append(_plain(tensors).clone())
            return backward(tensors, *args, **kwargs)

        return record_and_call

    def _recording_next(self, following: Any) -> Any:
        @wraps(following)
        def call_and_record(iterator: Any) -> Any:
            batch = following(iterator)
            with self._outside_of_the_step():
                if iterator not in self._iterators:
                    self._iterators_seen += 1
                    self._iterators[iterator] = self._iterators_seen
                self._batches.append((self._iterators[iterator], *_fingerprint(batch)))
            return batch

        return call_and_record

    def _noting_schedulers(self, initialise: Any) -> Any:
        @wraps(initialise)
        def initialise_and_note(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            self._schedulers.append(weakref.ref(scheduler))
            initialise(scheduler, *args, **kwargs)

        return initialise_and_note

    @contextmanager
    def _outside_of_the_step(self) -> Iterator[None]:
        """Leave the block out of the time of a step."""
        _synchronise()
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_wrapper(optimizer):
            with self._outside_of_the_step():
                self._gradient_norm = _norm([p.grad for p in _parameters(optimizer) if p.grad is not None])
                self._rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_wrapper(optimizer):
            return
        if self._done < self._steps:
            with self._outside_of_the_step():
                self._write(
                    "step",
                    losses=[repr(float(loss)) for loss in self._losses],
                    gradient_norm=repr(self._gradient_norm),
                    learning_rates=[repr(rate) for rate in self._rates],
                    parameters=_checksum(_parameters(optimizer)),
                    batches=self._batches,
                    seconds=self._seconds,
                )
                self._done += 1
                self._losses, self._batches = [], []
                if self._done == self._steps:
                    self._save(_parameters(optimizer))
                    self._end()
            self._seconds = 0.0
        if self._done == self._steps:
            raise SystemExit(0)

    def _write(self, kind: str, **values: Any) -> None:
        if self._stream is None:
            import torch

            rank = int(os.environ.get("RANK", "0"))
            self._stream = (self._folder / f"rank-{rank}.jsonl").open("x", encoding="utf-8")
            self._process = os.getpid()
            self._write(
                "start",
                rank=rank,
                processes=int(os.environ.get("WORLD_SIZE", "1")),
                torch=torch.__version__,
                accelerate=getattr(sys.modules.get("accelerate"), "__version__", None),
            )
        self._stream.write(json.dumps({"kind": kind, **values}) + "\n")
        self._stream.flush()

    def _save(self, parameters: list[torch.Tensor]) -> None:
        """Keep the parameters of the first rank, unless they are very large."""
        import torch

        plain = [_plain(parameter) for parameter in parameters]
        if os.environ.get("RANK", "0") == "0" and sum(p.nbytes for p in plain) <= _MOST_PARAMETER_BYTES:
            torch.save([p.cpu() for p in plain], self._folder / PARAMETERS)

    def _end(self) -> None:
        if self._stream is None or self._has_ended or self._process != os.getpid():
            return
        self._has_ended = True
        import torch

        cuda: Any = torch.cuda
        on_device = cuda.max_memory_allocated() if cuda.is_initialized() else 0
        schedulers = [scheduler for scheduler in (reference() for reference in self._schedulers) if scheduler]
        self._write(
            "end",
            schedulers=[int(scheduler.last_epoch) for scheduler in schedulers],
            peak_memory=_peak_memory(),
            peak_device_memory=on_device,
        )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_wrapper(optimizer: Any) -> bool:
    """Tell whether an optimizer only calls another one, whose step is recorded."""
    return hasattr(getattr(optimizer, "optimizer", None), "param_groups")


def _plain(tensor: Any) -> torch.Tensor:
    """Return the values of a tensor; of a sharded one, those of this process."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    result: torch.Tensor = local.coalesce().values() if local.is_sparse else local
    return result


def _norm(gradients: list[Any]) -> float:
    import torch

    norms = [torch.linalg.vector_norm(_plain(gradient).to(torch.float32)).double().cpu() for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _checksum(tensors: list[torch.Tensor]) -> str:
    """Return a text that changes with any bit of the tensors."""
    import torch

    sums = []
    for tensor in tensors:
        plain = _plain(tensor).contiguous()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        sums.append(plain.view(getattr(torch, _INTEGERS[plain.element_size()])).sum(dtype=torch.int64).cpu())
    return hashlib.sha256(repr([int(total) for total in sums]).encode()).hexdigest()[:16]


def _fingerprint(batch: Any) -> tuple[int, int]:
    """Return the number of samples of a batch, and a checksum of its tensors."""
    import torch

    tensors = list(_tensors(batch))
    checksum = 0
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().flatten()
        contents: Any = plain.view(torch.uint8).numpy() if plain.numel() else b""
        checksum = zlib.crc32(contents, checksum)
    return next((len(tensor) for tensor in tensors if tensor.ndim), len(tensors)), checksum


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if hasattr(batch, "detach"):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from _tensors(value)


def _synchronise() -> None:
    import torch

    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.synchronize()


def _peak_memory() -> int:
    """Return the most bytes that this process has had; what was before its `exec` does not count."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def _run_the_next_sitecustomize(folder: Path) -> None:
    """Run the file of this name that this one hides."""
    others = [place for place in sys.path if not place or Path(place).resolve() != folder.resolve()]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    _here = Path(__file__).parent
    sys.meta_path.insert(0, AfterTorch(_here))
    _run_the_next_sitecustomize(_here)
