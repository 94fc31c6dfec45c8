"""Read torch's flight recorder, where it is enabled: always with NCCL, with gloo by TORCH_FR_BUFFER_SIZE."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..errors.callers import is_user_file


def newest_collective() -> str:
    """Describe the newest incomplete collective; "" where nothing is recorded."""
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return ""
    try:
        entries = pickle.loads(dump(onlyActive=True)).get("entries") or []  # written by this process
    except Exception:  # a diagnosis must not fail over a detail
        return ""
    incomplete = [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
    return _describe(incomplete[-1]) if incomplete else ""


def _describe(entry: dict[str, Any]) -> str:
    tensors = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    inputs = ", ".join(f"{dtype}{sizes}" for dtype, sizes in tensors)
    frames = entry.get("frames") or []
    user_frame = next((frame for frame in frames if is_user_file(frame["filename"])), None)
    where = f" from {Path(user_frame['filename']).name}:{user_frame['line']}" if user_frame else ""
    return f"{entry['profiling_name']} number {entry['collective_seq_id']}({inputs}), {entry['state']}{where}"
