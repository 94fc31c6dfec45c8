"""What torch's own flight recorder has noted, where it is on: always with NCCL, with gloo by TORCH_FR_BUFFER_SIZE."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..errors.callers import is_of_the_user


def newest_collective() -> str:
    """Describe the newest collective that has not been seen to complete; "" where nothing is recorded."""
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return ""
    try:
        entries = pickle.loads(dump(onlyActive=True)).get("entries") or []  # of this very process
    except Exception:  # a diagnosis must not fail for want of a detail
        return ""
    open_ones = [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
    return _described(open_ones[-1]) if open_ones else ""


def _described(entry: dict[str, Any]) -> str:
    tensors = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    brought = ", ".join(f"{dtype}{sizes}" for dtype, sizes in tensors)
    frames = entry.get("frames") or []
    users = next((frame for frame in frames if is_of_the_user(frame["filename"])), None)
    where = f" from {Path(users['filename']).name}:{users['line']}" if users else ""
    return f"{entry['profiling_name']} number {entry['collective_seq_id']}({brought}), {entry['state']}{where}"
