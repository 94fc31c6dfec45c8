"""The single owner of process state: rank, device and process group."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ...config.enums import DistributedType
from ...config.environment import export, read, read_setting
from ...config.meshes import clear_mesh_caches
from ...config.plugins.handlers import InitProcessGroupKwargs
from ...errors import RuntimeConflictError, StuckError, UnsupportedSettingError
from ...errors.callers import warn
from .. import phases
from ..devices import device as devices, xla
from ..devices.affinity import set_numa_affinity
from ..membership.member import Agreement, HeartbeatMonitor, Member, MembershipChanged
from ..phases import WAITING, during
from ..process import ProcessInfo
from . import aborting
from .forks import freeze_inherited_objects
from .network import interface_towards, is_loopback
from .replica import ReplicaGroups

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RUNNING = 1 << 40
_SECONDS_TO_CONNECT = timedelta(seconds=10)
"""How long members wait for each other's connections, once all have agreed to form a group."""
_REQUESTS_PER_SECOND = 2_000
"""Requests to the store from all waiting processes together."""
_SECONDS_TO_FREE = 5.0
"""How long the end of a training waits until the group of the previous one is freed. It takes milliseconds."""

# [Note: who frees a process group]
# Models hold the process group too, from C++, and may outlive it in a script. The last reference frees it, and the
# destructor waits for the group's own thread. From Python that is harmless, because the GIL is released meanwhile; from
# C++ it is a deadlock if the thread needs the GIL at that moment. So Python keeps a destroyed group after training.
# The destructor also waits for collectives that the other ranks never joined, up to the group's timeout, so a thread of
# its own frees the group.
# Forked children do not have that thread and never free it: see [Note: garbage of the parent].


def _free(groups: list[Any]) -> None:
    """Free process groups. One that waits for a collective is freed later, see [Note: who frees a process group]."""
    thread = threading.Thread(target=groups.clear, name="meshwright-free-groups", daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_FREE)
    if thread.is_alive():
        logger.warning(
            "A collective of a process group that was left never completed: not every rank called it. Its connections "
            "stay open until the group's timeout."
        )


class Runtime:
    """The rank, the device and the process group of this process.

    There is one at a time. `PartialState` and `AcceleratorState` are views of it; code inside the library uses
    `Runtime.current()`.
    """

    _current: ClassVar[Runtime | None] = None
    # The group that a runtime of this process created, and its options: a later runtime that finds it owns it.
    _opened: ClassVar[tuple[weakref.ref[Any], InitProcessGroupKwargs] | None] = None
    _closed: ClassVar[list[Any]] = []  # see [Note: who frees a process group]

    def __init__(self, *, cpu: bool = False, init_handler: InitProcessGroupKwargs | None = None) -> None:
        self.cpu = cpu or bool(read_setting("cpu"))
        self.debug = bool(read_setting("debug"))
        self.fork_launched = bool(read_setting("fork_launched"))
        self.owns_group = False
        self.backend: str | None = None
        self.shutdown_hooks: list[Callable[[], None]] = []  # called before the group is destroyed
        self._pid = os.getpid()
        self._rendezvous_store: Any = None  # the store of the previous group, reused by the next one
        self.meshes: dict[tuple[int, ...], Any] = {}  # sizes along the axes -> the mesh, created once
        self.saves: Counter[str] = Counter()  # number of checkpoints saved at one point of the run
        self.num_copying = 0  # the Accelerators that keep copies in memory
        self.recovery: Any = None  # the `Recovery` of this process, where members come and go
        self.training: dict[str, Any] | None = None  # the newest Accelerator's settings, behind AcceleratorState
        self.settings: Any = None  # `TrainingSettings` of the first Accelerator, which later ones share by default
        self.process = _process_info()
        self.num_savers = self.process.world_size - 1  # the other ranks that took part in the last checkpoint
        if read_setting("cpu_affinity"):
            set_numa_affinity(
                self.process.local_rank,
                self.debug,
                local_processes=self.process.local_world_size,
                near_devices=not self.cpu,
            )
        self.init_handler = init_handler or InitProcessGroupKwargs()
        self.device = devices.device_for(
            local_rank=self.process.local_rank,
            world_size=self.process.world_size,
            cpu=self.cpu,
            requested=read_setting("device"),
            launcher=self.process.launcher,
        )
        devices.activate(self.device)
        if devices.is_xla(self.device):
            self.process, self.backend = xla.processes(self.process), "xla"
        self.num_processes = self.process.world_size
        self.process_index = self.process.rank
        self.local_process_index = self.process.local_rank
        self.distributed_type: DistributedType = DistributedType.NO
        if self.num_processes > 1 or devices.is_xla(self.device):
            self.distributed_type = devices.distributed_type_of(self.device)
        self.replica_groups: ReplicaGroups | None = None  # where a replica has several processes
        on_streams = self.device if devices.has_streams(self.device) else None
        self.member = Member.from_environment(self.process_index, self.num_processes, on_streams)
        if self.member is not None:
            self._become_member(self.member)
        elif self.num_processes > 1:
            self._join_group(self.init_handler)

    def __reduce__(self) -> tuple[Callable[[], Runtime], tuple[()]]:
        """Copy or pickle a reference: there is one runtime per process, and its groups stay with it."""
        return Runtime.current, ()

    @classmethod
    def recorded(cls, attributes: Mapping[str, Any]) -> Runtime:
        """Return a runtime that shows attributes of another process and has no group of its own."""
        runtime = cls.__new__(cls)
        runtime.cpu = bool(attributes.get("_cpu"))
        runtime.debug = bool(attributes.get("debug"))
        runtime.fork_launched = bool(attributes.get("fork_launched"))
        runtime.backend = attributes.get("backend")
        runtime.device = attributes["device"]
        runtime.distributed_type = attributes["distributed_type"]
        runtime.num_processes = attributes["num_processes"]
        runtime.process_index = attributes["process_index"]
        runtime.local_process_index = attributes["local_process_index"]
        return runtime

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
        """Start the runtime, or return the running one if it matches the request."""
        running = cls._current
        if running is None:
            cls._current = running = cls(cpu=cpu, init_handler=init_handler)
        elif cpu and not devices.is_cpu(running.device):
            raise RuntimeConflictError(
                f"Rank {running.process_index} already runs on {running.device}; cpu=True came later and one process "
                "has one device. Pass cpu=True to the first Accelerator or PartialState, or call "
                "PartialState._reset_state() before this one."
            )
        elif running._rendezvous_store is not None and not dist.is_initialized():
            running._join_group(init_handler or running.init_handler)
        elif init_handler is not None and init_handler != running.init_handler:
            running._warn_of_open_group(init_handler)
        return running

    @classmethod
    def detach(cls) -> None:
        """Drop the runtime. A process group that it created stays open, and the next runtime adopts it.

        Libraries do this between two trainings, without synchronizing the ranks. Destroying the group here would
        disconnect ranks that still use it, and a second group at the same address would find the keys of the first.
        """
        running, cls._current = cls._current, None
        if running is not None:
            running._clear_meshes()
        if phases.meter is not None:  # it asks an Accelerator whose state is gone
            phases.meter.stop()

    @classmethod
    def reset(cls) -> None:
        """Drop the runtime, and destroy a process group that it created."""
        running, cls._current = cls._current, None
        if running is not None:
            running.leave_group()

    def _join_group(self, handler: InitProcessGroupKwargs) -> None:
        freeze_inherited_objects()
        devices.prepare_collectives(self.device)
        if not dist.is_initialized():
            options: dict[str, Any] = {}
            backend = devices.collective_backend(self.device, handler.backend)
            if read_setting("debug_rank") is not None:
                options["timeout"] = _disable_timeouts()
            elif (timeout := handler.timeout or devices.default_timeout(backend)) is not None:
                options["timeout"] = timeout
            if handler.init_method is not None:
                options["init_method"] = handler.init_method
            elif (address := self.process.rendezvous_address()) is not None:
                options["init_method"] = address
            if self._rendezvous_store is not None:  # keys of the previous group are not for this one
                options.pop("init_method", None)
                options["store"] = self._rendezvous_store = dist.PrefixStore("next", self._rendezvous_store)  # type: ignore[attr-defined]
            if options.keys() & {"init_method", "store"}:
                options |= {"rank": self.process_index, "world_size": self.num_processes}
            self._choose_interface(options.get("init_method"))
            # Not bound to a device: torch would split the world for every later group, whoever makes it, together with
            # its gloo backend. Ranks outside such a group wait for ranks that never come (pytorch#145376).
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

    def _become_member(self, member: Member) -> None:
        """Form the first group of a run whose replicas come and go; a replacement is alone until it joins one."""
        self.backend = devices.collective_backend(self.device, self.init_handler.backend)
        devices.prepare_collectives(self.device)
        if member.device is not None:
            devices.prepare_to_survive()
        self._choose_interface(None)
        atexit.register(self._leave_at_exit)
        if member.has_joined:
            self.form_group({})
        else:
            self.num_processes = 1

    def spread_replica(self, shards: int) -> ReplicaGroups:
        """Open the groups of a replica of several processes; a replacement is alone with its replica until it joins."""
        member, backend = self.member, self.backend
        assert member is not None
        assert backend is not None
        if self.replica_groups is None:
            member.spread_replicas(shards)
            if not member.has_joined:
                self.num_processes, self.process_index = shards, member.rank % shards
                self._open_default_group(member.store_of_replica(), self._timeout)
            self.replica_groups = ReplicaGroups(member, backend, self._timeout)
        return self.replica_groups

    @property
    def _timeout(self) -> timedelta:
        """How long collectives wait."""
        assert self.backend is not None
        return self.init_handler.timeout or devices.default_timeout(self.backend) or dist.default_pg_timeout

    def _open_default_group(self, store: Any, timeout: timedelta) -> None:
        """Open the default group of processes that wait so long for each other's connections."""
        # torch names groups by a counter per process, which a failed attempt raises too: ranks with different counters
        # would look for each other under different names.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            self.backend,
            store=store,
            rank=self.process_index,
            world_size=self.num_processes,
            timeout=timeout,
        )
        dist.distributed_c10d._set_pg_timeout(self._timeout)
        self.owns_group = True

    def leave_members(self, *, is_pending: bool) -> None:
        """Leave the group of the members. With `is_pending` a collective still waits in it, and it is never freed."""
        if dist.is_initialized():
            assert self.member is not None
            self.member.release = None
            self._abort_groups()
            if self.replica_groups is not None:
                self.replica_groups.take_out()
            if is_pending:
                Runtime._closed += list(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()

    def _abort_groups(self) -> None:
        """End the collectives of all groups on devices but that inside of the replica, which stays."""
        inside = None if self.replica_groups is None else self.replica_groups.inside
        aborting.abort(group for group in aborting.open_groups() if group is not inside)

    def _require_aborts(self) -> None:
        """Refuse a backend whose collectives wait for ever for a member that was lost."""
        if not aborting.can_abort(dist.group.WORLD):
            raise UnsupportedSettingError(
                f"--survive on {self.device.type} with the backend {self.backend}",
                "its collectives cannot be aborted together, so they would wait for ever for a replica that is lost.",
                "Use --max_restarts with checkpoints or --memory_copies_every there.",
            )

    def form_group(self, status: Any) -> Agreement:
        """Agree with the other members on who is there, and open the process group of all of them."""
        assert self.member is not None
        assert self.backend is not None
        while True:
            agreement = self.member.agree(status)
            self.num_processes = len(agreement.members)
            self.process_index = agreement.members.index(self.member.rank)
            try:
                self._open_default_group(self.member.store_of_epoch(), _SECONDS_TO_CONNECT)
                if self.replica_groups is not None:
                    self.replica_groups.put_back(agreement.members)
                    self.replica_groups.open_counterparts(agreement.members, _SECONDS_TO_CONNECT)
            except RuntimeError as error:
                logger.debug("Rank %d could not connect: %s", self.member.rank, error)
                self.member.learn_of_loss()
                self.leave_members(is_pending=True)
                continue
            if self.member.device is not None:
                self._require_aborts()
                self.member.release = self._abort_groups
            return agreement

    def _choose_interface(self, rendezvous: str | None) -> None:
        """Let gloo use the interface by which the others come, unless the user or the launcher chose one.

        gloo would take that of the host's own name: many hosts resolve it to a loopback address, and others to one at
        which processes of a single machine need not listen.
        """
        if read("GLOO_SOCKET_IFNAME"):
            return
        host, _ = _place_of(rendezvous)
        if host is None or (self.process.local_world_size == self.num_processes and not is_loopback(host)):
            return
        if (interface := interface_towards(host)) is not None:
            export({"GLOO_SOCKET_IFNAME": interface})

    def _warn_of_open_group(self, handler: InitProcessGroupKwargs) -> None:
        ignored = handler.to_kwargs()
        if ignored and self.num_processes > 1:
            warn(
                f"Rank {self.process_index}: the process group was open already, so these options have no effect: "
                f"{ignored}. Pass them to the first Accelerator or PartialState, which opens it.",
            )

    def leave_group(self, *, all_ranks: bool = False) -> None:
        """Destroy the process group, if this runtime created it.

        With `all_ranks` every rank does so at this point; else the others see closed connections. See [Note: who frees
        a process group].
        """
        while self.shutdown_hooks:
            self.shutdown_hooks.pop()()
        if self.owns_group and dist.is_initialized():
            self._rendezvous_store = self._rendezvous_store or dist.distributed_c10d._get_default_store()
            closed, Runtime._closed = Runtime._closed, []
            (Runtime._closed if all_ranks else closed).extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
            if closed:
                _free(closed)
        self.owns_group = False
        self._clear_meshes()
        atexit.unregister(self._leave_at_exit)

    def _leave_at_exit(self) -> None:
        """Destroy the group of a script that ends without `end_training`.

        After a failure it stays open: destroying it may wait for other ranks, which are about to be informed.
        """
        if self.belongs_to_this_process() and getattr(sys, "last_value", None) is None:
            self.leave_group(all_ranks=True)

    def belongs_to_this_process(self) -> bool:
        """Return whether this process created it, and not its parent, whose exit hooks a forked child inherits."""
        return os.getpid() == self._pid

    def _clear_meshes(self) -> None:
        if self.meshes:
            clear_mesh_caches()
            self.meshes.clear()

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    def barrier(self) -> None:
        """Wait until every process has reached this point."""
        with during(WAITING):
            self.run_collective(self._barrier, carries_data=False)

    def _barrier(self) -> None:
        """Wait for the queued work of this device, then for the others: their devices have done it too."""
        if self.num_processes > 1:
            if self.member is not None:
                self.member.wait_for_device()
            elif devices.has_streams(self.device):
                torch.accelerator.current_stream(self.device).synchronize()
            dist.barrier()

    def run_collective(self, collective: Callable[[], T], **facts: Any) -> T:
        """Run a collective of all processes; where members come and go, by `Recovery.run_collective`."""
        return collective() if self.recovery is None else self.recovery.run_collective(collective, **facts)

    @property
    def device_of_numbers(self) -> torch.device:
        """The device of small results that the host reads at once.

        It is the host where the process group can carry them there, so that nobody waits for an accelerator.
        """
        has_host_backend = dist.is_initialized() and devices.CPU in dist.group.WORLD._device_types  # type: ignore[union-attr]
        return devices.CPU if has_host_backend else self.device

    def store(self, name: str) -> Any:
        """Return the store of the process group, with a prefix of its own."""
        return dist.PrefixStore(f"meshwright/{name}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]

    @contextmanager
    def main_process_first(self, goes_first: bool) -> Iterator[None]:
        """Let the processes with `goes_first` run the block before the others.

        The others poll the store instead of a collective, so that no backend timeout ends an hour of work. If the block
        raises on a process that goes first, the others are notified and released, so that users see its error and not a
        hang.
        """
        if self.num_processes == 1:
            yield
            return
        # One counter per call: every process adds 1 on arrival, and one that goes first adds _RUNNING until it is done.
        # It equals the number of processes when all have arrived and none is running the block.
        store = self.store("main_process_first")
        counter = f"arrivals/{store.add(f'calls/{self.process_index}', 1)}"
        store.add(counter, 1 + _RUNNING * goes_first)
        if not goes_first:
            self.wait_for_first(store, counter)
        try:
            yield
        except BaseException as error:
            if goes_first:
                failure = f"Rank {self.process_index} failed with {type(error).__name__}: {error}"
                store.set(f"{counter}/failure", failure)
            raise
        finally:
            if goes_first:
                store.add(counter, -_RUNNING)

    def wait_for_key(self, store: Any, keys: Sequence[str], process: int) -> str:
        """Wait until a process sets one of the keys of the store, and return the value of the first that is set.

        It polls instead of waiting inside the store, where another thread could not use the connection. Where members
        come and go, it raises `MembershipChanged` if the process was lost before.
        """
        member = self.member
        heartbeats = None if member is None else HeartbeatMonitor(member, member.members)
        for pause in self._pauses():
            is_lost = member is not None and member.has_lost(member.members[process])
            found = next((key for key in keys if store.check([key])), None)
            if found is not None:
                return str(store.get(found).decode())
            if is_lost:
                raise MembershipChanged(f"Rank {process} was lost, and this one waited for it.")
            if heartbeats is not None:
                heartbeats.look()
            time.sleep(pause)
        raise AssertionError("the pauses do not end")

    def _pauses(self) -> Iterator[float]:
        """Yield growing pauses in seconds between two polls."""
        pause = 0.005
        while True:
            yield pause
            pause = min(2 * pause, max(0.5, self.num_processes / _REQUESTS_PER_SECOND))

    def wait_for_first(self, store: Any, counter: str) -> None:
        """Wait until the processes that go first have run their block."""
        pauses = self._pauses()
        try:
            while store.add(counter, 0) != self.num_processes:
                if self.member is not None:
                    self.member.require_all()
                time.sleep(next(pauses))
            failure = store.get(f"{counter}/failure").decode() if store.check([f"{counter}/failure"]) else ""
        except dist.DistError as error:
            raise StuckError(
                f"Rank {self.process_index} waited for its turn at the store, and the process that keeps the store is "
                "gone: rank 0, or the launcher. Find out how it ended; the run cannot continue without it."
            ) from error
        if failure:
            logger.warning("%s in the block that it ran first. Rank %d continues.", failure, self.process_index)


def _place_of(rendezvous: str | None) -> tuple[str | None, int | None]:
    """Return host and port of a rendezvous; None stands for that of torchrun's variables."""
    if rendezvous is not None:
        found = urlsplit(rendezvous)
        return found.hostname, found.port
    port = read("MASTER_PORT")
    return read("MASTER_ADDR"), int(port) if port else None


def _disable_timeouts() -> timedelta:
    """Return a timeout that is never reached, and make it the default of later groups: for debuggers."""
    timeout = timedelta(days=30)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, timeout)
    return timeout


def rank_of_this_process() -> int:
    """Return the rank; before a runtime was started, from the launcher's variables."""
    runtime = Runtime.existing()
    return _process_info().rank if runtime is None else runtime.process_index


def _process_info() -> ProcessInfo:
    """Read the launcher's variables; a process group that the user has created takes precedence."""
    info = ProcessInfo.from_environment()
    if not dist.is_available() or not dist.is_initialized():
        return info
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (info.rank, info.world_size):
        return info
    local = int(read("LOCAL_RANK") or rank)
    return ProcessInfo(rank=rank, world_size=world_size, local_rank=local, local_world_size=world_size, launcher="user")


def wait_for_everyone() -> None:
    """Wait until every process has reached this point."""
    Runtime.current().barrier()
