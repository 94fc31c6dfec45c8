"""The one owner of process state: who this process is, its device and its process group."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from ...config.enums import DistributedType
from ...config.environment import read, read_setting
from ...config.meshes import clear_mesh_caches
from ...config.plugins.handlers import InitProcessGroupKwargs
from ...errors import RuntimeConflictError, StuckError
from ...errors.callers import warn
from ..devices import device as devices
from ..devices.affinity import set_numa_affinity
from ..phases import WAITING, during
from ..process import ProcessInfo
from .forks import keep_inheritances

logger = logging.getLogger(__name__)

_UNDER_WAY = 1 << 40
_QUESTIONS_PER_SECOND = 2_000
"""That all processes together ask of the store while they wait there."""

# [Note: who frees a process group]
# Models hold the group too, from C++, and may outlive it in a script. Whoever lets go last frees it, and that waits
# for the group's own thread: harmless from Python, which releases its lock for that time; a deadlock from C++, which
# does not, if the thread wants that lock just then. So at the end of a training Python keeps the group it has closed.
# Forked children, which do not have that thread, never do: see [Note: garbage of the parent].


class Runtime:
    """A process that knows its rank, its device and how to meet the others.

    There is one at a time. `PartialState` and `AcceleratorState` are views of it; code inside the library asks
    `Runtime.current()`.
    """

    _current: ClassVar[Runtime | None] = None
    # The group that a runtime of this process opened, and how: whoever finds it open later owns it.
    _opened: ClassVar[tuple[weakref.ref[Any], InitProcessGroupKwargs] | None] = None
    _closed: ClassVar[list[Any]] = []  # see [Note: who frees a process group]

    def __init__(self, *, cpu: bool = False, init_handler: InitProcessGroupKwargs | None = None) -> None:
        self.cpu = cpu or bool(read_setting("cpu"))
        self.debug = bool(read_setting("debug"))
        self.fork_launched = bool(read_setting("fork_launched"))
        self.owns_group = False
        self.backend: str | None = None
        self.farewells: list[Callable[[], None]] = []  # called before the group is closed
        self._pid = os.getpid()
        self._meeting_place: Any = None  # the store of the group that was left, where the next one meets
        self.meshes: dict[tuple[int, ...], Any] = {}  # sizes along the axes -> the mesh, made once
        self.saves: Counter[str] = Counter()  # how often a checkpoint was saved at one point of the run
        self.training: dict[str, Any] | None = None  # the newest Accelerator's record, behind AcceleratorState
        self.process = _process_info()
        self.num_savers = self.process.world_size - 1  # the other ranks that came to the last checkpoint
        if read_setting("cpu_affinity"):
            set_numa_affinity(self.process.local_rank, self.debug, local_processes=self.process.local_world_size)
        self.init_handler = init_handler or InitProcessGroupKwargs()
        self.device = devices.device_for(
            local_rank=self.process.local_rank,
            world_size=self.process.world_size,
            cpu=self.cpu,
            requested=read_setting("device"),
        )
        devices.activate(self.device)
        self.num_processes = self.process.world_size
        self.process_index = self.process.rank
        self.local_process_index = self.process.local_rank
        self.distributed_type: DistributedType = DistributedType.NO
        if self.num_processes > 1:
            self._join_group(self.init_handler)
            self.distributed_type = devices.distributed_type_of(self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: libraries pickle settings that hold a state, and with it this."""
        return self.__dict__ | {"farewells": [], "_meeting_place": None, "meshes": {}}

    @classmethod
    def current(cls) -> Runtime:
        """Return the runtime of this process, starting it on first use."""
        return cls._current if cls._current is not None else cls.start()

    @classmethod
    def existing(cls) -> Runtime | None:
        """Return the runtime if it was started, without starting it."""
        return cls._current

    @classmethod
    def start(cls, *, cpu: bool = False, init_handler: InitProcessGroupKwargs | None = None) -> Runtime:
        """Start the runtime, or return the running one if it fits what is asked for now."""
        running = cls._current
        if running is None:
            cls._current = running = cls(cpu=cpu, init_handler=init_handler)
        elif cpu and not devices.is_cpu(running.device):
            raise RuntimeConflictError(
                f"Rank {running.process_index} already runs on {running.device}; cpu=True came later and one process "
                "has one device. Pass cpu=True to the first Accelerator or PartialState, or call "
                "PartialState._reset_state() before this one."
            )
        elif running._meeting_place is not None and not dist.is_initialized():
            running._join_group(init_handler or running.init_handler)
        elif init_handler is not None and init_handler != running.init_handler:
            running._warn_of_open_group(init_handler)
        return running

    @classmethod
    def forget(cls) -> None:
        """Forget the runtime. A process group that it opened stays open, and is the next runtime's.

        Libraries do this between two trainings, each rank in its own time: closing the group here would cut off the
        ranks that still use it, and a second one at the same address would find what the first one left there.
        """
        running, cls._current = cls._current, None
        if running is not None:
            running._forget_meshes()

    @classmethod
    def reset(cls) -> None:
        """Forget the runtime; a process group it created is closed."""
        running, cls._current = cls._current, None
        if running is not None:
            running.leave_group()

    def _join_group(self, handler: InitProcessGroupKwargs) -> None:
        keep_inheritances()
        if not dist.is_initialized():
            options: dict[str, Any] = {}
            if read_setting("debug_rank") is not None:
                options["timeout"] = _let_debuggers_take_their_time()
            elif handler.timeout is not None:
                options["timeout"] = handler.timeout
            if handler.init_method is not None:
                options["init_method"] = handler.init_method
            elif (meeting_place := self.process.meeting_place()) is not None:
                options["init_method"] = meeting_place
            if self._meeting_place is not None:  # what the group before left in the store is not for this one
                options.pop("init_method", None)
                options["store"] = self._meeting_place = dist.PrefixStore("next", self._meeting_place)  # type: ignore[attr-defined]
            if options.keys() & {"init_method", "store"}:
                options |= {"rank": self.process_index, "world_size": self.num_processes}
            bound = devices.group_device(self.device)
            if bound is not None:
                options["device_id"] = bound
            backend = devices.collective_backend(self.device, handler.backend)
            dist.init_process_group(backend, **options)
            self.owns_group = True
            self.backend = backend.rpartition(":")[2]
            Runtime._opened = weakref.ref(dist.group.WORLD), handler
            atexit.register(self._leave_at_exit)
        else:
            self.backend = dist.get_backend()
            group, opened_with = Runtime._opened or (lambda: None, None)
            self.owns_group = group() is dist.group.WORLD
            if not self.owns_group or handler != opened_with:
                self._warn_of_open_group(handler)

    def _warn_of_open_group(self, handler: InitProcessGroupKwargs) -> None:
        ignored = handler.to_kwargs()
        if ignored and self.num_processes > 1:
            warn(
                f"Rank {self.process_index}: the process group was open already, so these options have no effect: "
                f"{ignored}. Pass them to the first Accelerator or PartialState, which opens it.",
            )

    def leave_group(self, *, together: bool = False) -> None:
        """Close the process group, if this runtime opened it.

        Others notice by closed connections, unless all leave `together`. See [Note: who frees a process group].
        """
        while self.farewells:
            self.farewells.pop()()
        if self.owns_group and dist.is_initialized():
            self._meeting_place = self._meeting_place or dist.distributed_c10d._get_default_store()
            Runtime._closed = list(dist.distributed_c10d._world.pg_map) if together else []
            dist.destroy_process_group()
        self.owns_group = False
        self._forget_meshes()
        atexit.unregister(self._leave_at_exit)

    def _leave_at_exit(self) -> None:
        """Close the group of a script that ends without `end_training`.

        After a failure it stays: closing may wait for others, and they are about to be told.
        """
        if self.is_of_this_process() and getattr(sys, "last_value", None) is None:
            self.leave_group(together=True)

    def is_of_this_process(self) -> bool:
        """Tell whether this process made it, and none it was forked from, whose exit functions it has."""
        return os.getpid() == self._pid

    def _forget_meshes(self) -> None:
        if self.meshes:
            clear_mesh_caches()
            self.meshes.clear()

    @property
    def is_main_process(self) -> bool:
        """Tell whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Tell whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Tell whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.num_processes > 1:
            with during(WAITING):
                dist.barrier()

    def store(self, name: str) -> Any:
        """Return the process group's store, where processes leave notes for each other; names keep notes apart."""
        return dist.PrefixStore(f"accelerate/{name}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]

    @contextmanager
    def main_process_first(self, goes_first: bool) -> Iterator[None]:
        """Let the processes with `goes_first` run the block before the others.

        The others wait at the store and in no collective: no backend's timeout ends an hour of work. If the block
        raises on a process that goes first, the others are told and released, so that its error and not a hang is
        what people see.
        """
        if self.num_processes == 1:
            yield
            return
        # One number per turn: every process adds 1 when it comes, and one that goes first _UNDER_WAY until it is done.
        # It equals the number of processes when all have come and nobody is under way.
        store = self.store("turns")
        turn = f"turn/{store.add(f'of/{self.process_index}', 1)}"
        store.add(turn, 1 + _UNDER_WAY * goes_first)
        if not goes_first:
            self._await_turn(store, turn)
        try:
            yield
        except BaseException as error:
            if goes_first:
                store.set(f"{turn}/failure", f"Rank {self.process_index} failed with {type(error).__name__}: {error}")
            raise
        finally:
            if goes_first:
                store.add(turn, -_UNDER_WAY)

    def await_note(self, store: Any, key: str) -> str:
        """Wait at the store until somebody leaves a note under this key, and return it.

        It asks again and again instead of waiting inside the store, where another thread could not use the connection.
        """
        pauses = self._pauses()
        while not store.check([key]):
            time.sleep(next(pauses))
        return str(store.get(key).decode())

    def _pauses(self) -> Iterator[float]:
        """Yield the seconds between two questions, longer and longer."""
        pause = 0.005
        while True:
            yield pause
            pause = min(2 * pause, max(0.5, self.num_processes / _QUESTIONS_PER_SECOND))

    def _await_turn(self, store: Any, turn: str) -> None:
        pauses = self._pauses()
        try:
            while store.add(turn, 0) != self.num_processes:
                time.sleep(next(pauses))
            failure = store.get(f"{turn}/failure").decode() if store.check([f"{turn}/failure"]) else ""
        except dist.DistError as error:
            raise StuckError(
                f"Rank {self.process_index} waited for its turn at the store, and the process that keeps the store is "
                "gone: rank 0, or the launcher. Find out how it ended; the run cannot continue without it."
            ) from error
        if failure:
            logger.warning("%s in the block that it ran first. Rank %d continues.", failure, self.process_index)


def _let_debuggers_take_their_time() -> timedelta:
    """Return a timeout that nobody will meet, and make it the default of groups that are opened later."""
    timeout = timedelta(days=30)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, timeout)
    return timeout


def rank_of_this_process() -> int:
    """Return the rank, also before a runtime was started: then the launcher's variables tell."""
    runtime = Runtime.existing()
    return _process_info().rank if runtime is None else runtime.process_index


def _process_info() -> ProcessInfo:
    """Read the launcher's variables; a process group that the user has opened is trusted where it differs."""
    info = ProcessInfo.from_environment()
    if not dist.is_available() or not dist.is_initialized():
        return info
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (info.rank, info.world_size):
        return info
    local = int(read("LOCAL_RANK") or rank)
    return ProcessInfo(rank=rank, world_size=world_size, local_rank=local, local_world_size=world_size, launcher="user")


def wait_for_everyone() -> None:
    """Wait until every process has come here."""
    Runtime.current().barrier()
