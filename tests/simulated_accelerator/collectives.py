"""The process-group backend of the device: gloo's collectives on host copies, in the order of streams."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .build import extension
from .device_module import NAME

BACKEND = "simulated"


def register_collectives() -> None:
    """Let process groups serve the device, and let torch's reader of NCCL's recorder read theirs."""
    dist.Backend.register_backend(BACKEND, _new_backend, devices=[NAME])
    c10d: Any = torch._C._distributed_c10d
    c10d._dump_nccl_trace = dump_recorded
    c10d._dump_fr_trace = functools.partial(_dump_of_host, c10d._dump_fr_trace)


def dump_recorded(includeCollectives: bool = True, includeStackTraces: bool = True, onlyActive: bool = False) -> bytes:
    """Return what collectives were started, as torch 2.13 dumps NCCL's flight recorder."""
    entries = extension().recorded_entries(includeStackTraces, onlyActive) if includeCollectives else []
    return pickle.dumps({"version": "2.10", "entries": entries} if entries else {"version": "2.10"})


def _dump_of_host(dump: Callable[..., bytes], **options: bool) -> bytes:
    """Return what gloo's recorder has, without what the device's backend asks of gloo: that group has no name."""
    recorded = pickle.loads(dump(**options))
    entries = [entry for entry in recorded.pop("entries", ()) if entry["process_group"][0]]
    return pickle.dumps(recorded | ({"entries": entries} if entries else {}))


def _new_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)  # type: ignore[attr-defined]
    try:
        own: Any = store.clone()  # another connection, for the threads of streams
    except (AttributeError, NotImplementedError, RuntimeError):
        own = store
    return extension().Collectives(host, dist.PrefixStore("rules", own), timeout.total_seconds())  # type: ignore[attr-defined]
