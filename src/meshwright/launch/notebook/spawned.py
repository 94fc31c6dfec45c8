"""A function for `torch.multiprocessing.start_processes`: its first argument becomes the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...config.enums import DistributedType
from ...config.environment import export, read
from ...runtime.group.network import loopback_variables

RENDEZVOUS_FILE = "ACCELERATE_DEBUG_RDV_FILE"


class PrepareForLaunch:
    """Wrap a function for `torch.multiprocessing.start_processes`, which calls it with the number of the process.

    What the processes share (`WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`) is the parent's to set. With `debug` they are
    CPU processes, with the file `ACCELERATE_DEBUG_RDV_FILE` as their store.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str | DistributedType = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Set the rank of this process, and run the function."""
        world_size = read("WORLD_SIZE")
        variables = {"RANK": str(index), "LOCAL_RANK": str(index), "FORK_LAUNCHED": "1"}
        if world_size is not None:
            variables["LOCAL_WORLD_SIZE"] = world_size
        if self.debug:
            variables |= {"ACCELERATE_USE_CPU": "yes", **loopback_variables()}
        export(variables)
        if self.debug:
            _init_from_file_store(index, world_size, read(RENDEZVOUS_FILE))
        self.launcher(*args)


def _init_from_file_store(rank: int, world_size: str | None, file: str | None) -> None:
    if world_size is None or file is None:
        raise RuntimeError(
            f"Process {rank} was started with debug=True, which needs WORLD_SIZE and {RENDEZVOUS_FILE} (a path to a "
            "file that does not exist yet) in the parent's environment. debug_launcher does all of this."
        )
    from torch.distributed import FileStore, init_process_group  # type: ignore[attr-defined]

    init_process_group("gloo", rank=rank, world_size=int(world_size), store=FileStore(file, int(world_size)))
