"""Read torch's flight recorders: those of NCCL, of XCCL (XPU), and of gloo."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors.callers import is_user_file
from .place import COLLECTIVE, Place, place_of_call

_RECORDERS = ("_dump_nccl_trace", "_dump_xccl_trace", "_dump_fr_trace")
_NAMES = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
"""What NCCL's recorder calls an operation -> what torch.distributed calls it."""


@dataclass(frozen=True)
class Outstanding:
    """A collective that was started and has not completed."""

    group: str
    number: int
    """Its place in the sequence of its group: the same collective has the same number on every rank."""
    entry: dict[str, Any]

    @property
    def key(self) -> str:
        """The same on every rank of its group."""
        return f"{self.group}:{self.number}"

    @property
    def is_of_gloo(self) -> bool:
        """Whether the host executes it: the stack of a thread that waits for it shows it, too."""
        return str(self.entry["profiling_name"]).startswith("gloo:")

    @property
    def name(self) -> str:
        """The operation, as torch.distributed names it."""
        words = str(self.entry["profiling_name"]).partition(":")[2].split()  # "nccl:send 0->1"
        name = words[0] if words else "collective"
        return _NAMES.get(name, name)

    def place(self) -> Place | None:
        """Return the line of the script that started it; None if no Python frame was recorded."""
        frames = [(frame["filename"], frame["line"], frame["name"]) for frame in self.entry.get("frames") or ()]
        if not any(is_user_file(file) for file, _, _ in frames):
            return None
        return place_of_call(frames, Place(phase=COLLECTIVE, operation=self.operation(), group_ranks=self.ranks()))

    def operation(self) -> str:
        """Describe the operation and its inputs."""
        return f"{self.name}({self._inputs()})"

    def ranks(self) -> list[int] | None:
        """Return the ranks of its process group; None if it is the world, or unknown."""
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            if name == self.group and isinstance(group, dist.ProcessGroup):
                ranks = sorted(dist.get_process_group_ranks(group))
                return None if len(ranks) == dist.get_world_size() else ranks
        return None

    def describe(self) -> str:
        """Describe it in one line."""
        place = self.place()
        where = f" from {place.location()}" if place is not None else ""
        return f"{self.entry['profiling_name']} number {self.number}({self._inputs()}), {self.entry['state']}{where}"

    def _inputs(self) -> str:
        tensors = zip(self.entry.get("input_dtypes", ()), self.entry.get("input_sizes", ()), strict=False)
        return ", ".join(f"{dtype}{sizes}" for dtype, sizes in tensors)


def outstanding_collectives(*, with_frames: bool = True) -> list[Outstanding]:
    """Return the collectives that were started and have not completed, oldest first; none where nothing is recorded."""
    found = []
    for name in _RECORDERS:
        dump: Any = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            found += _incomplete(dump, with_frames)
    return found


def _incomplete(dump: Any, with_frames: bool) -> list[Outstanding]:
    try:
        recorded = pickle.loads(dump(includeStackTraces=with_frames, onlyActive=True))  # written by this process
        return [
            Outstanding(entry["process_group"][0], entry["collective_seq_id"], entry)
            for entry in recorded.get("entries") or ()
            if entry.get("state") != "completed" and not entry.get("retired")
        ]
    except Exception:  # a diagnosis must not fail over a detail
        return []
