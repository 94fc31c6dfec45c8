"""Simulate one step of one rank: a host that issues, a stream that computes, and streams that communicate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import attrgetter

from ....runtime.devices.catalogue import DeviceCluster, format_of
from ..trace import BACKWARD, FORWARD, MAIN_STREAM, UPDATE, Collective, Operation, Trace
from .collectives import collective_seconds
from .roofline import LATENCY, estimate

Sums = dict[str, float]


@dataclass
class Timing:
    """Where the seconds of a step go. Every number is a sum, so that timings can be combined linearly."""

    seconds: float = 0.0
    phases: Sums = field(default_factory=dict)
    """Phase -> seconds of the main stream, waiting included; waiting for the last gradients belongs to the update."""
    kinds: Sums = field(default_factory=dict)
    """Kind of operation -> seconds in which it computes."""
    bounds: Sums = field(default_factory=dict)
    """What limits the computation -> seconds; `latency` includes waiting for the host."""
    communication: Sums = field(default_factory=dict)
    """`all_gather dp_shard`, the collective and its axes -> seconds, hidden ones too."""
    exposed: Sums = field(default_factory=dict)
    """The same -> seconds in which computation waits for it."""
    sent: Sums = field(default_factory=dict)
    """The same -> bytes."""
    calls: Sums = field(default_factory=dict)
    forward_flops: Sums = field(default_factory=dict)
    """Number format -> FLOPs of products and attention, causal attention in full."""
    backward_flops: Sums = field(default_factory=dict)
    """The same of the backward pass, without what is computed again in it."""

    @property
    def model_flops(self) -> float:
        """FLOPs that training needs: the forward pass, and at most twice as many in the backward pass.

        What is computed again adds nothing, by checkpoints or inside of attention. Frozen parameters need less.
        """
        forward = sum(self.forward_flops.values())
        return forward + min(sum(self.backward_flops.values()), 2 * forward)


def time_step(trace: Trace, cluster: DeviceCluster, step: int = -1) -> Timing:
    """Return the timing of a step of a rank, by default of the last.

    In a pipeline it is the rank's own work; `pipelines.replay` adds the waiting for other stages.
    """
    boundary = trace.steps[step]

    def inside(event: Operation | Collective) -> bool:
        return boundary.began <= event.tick < boundary.ended

    events: list[Operation | Collective] = [*filter(inside, trace.operations), *filter(inside, trace.collectives)]
    simulation = _Simulation(cluster)
    for event in sorted(events, key=attrgetter("tick")):
        simulation.wait_until(event.tick)
        if event.phase == UPDATE:
            simulation.wait_for_gradients()
        if isinstance(event, Collective):
            simulation.communicate(event)
        else:
            simulation.compute(event)
    return simulation.finish()


class _Simulation:
    """The clocks of the host, of the main stream and of the communication streams, in seconds from the step's begin."""

    def __init__(self, cluster: DeviceCluster) -> None:
        self._cluster = cluster
        self._timing = Timing()
        self._host = 0.0
        self._main = 0.0
        self._streams: dict[str, float] = defaultdict(float)
        self._groups: dict[tuple[int, ...], float] = defaultdict(float)
        """A process group runs one collective after the other, also if they are on different streams."""
        self._consumed: dict[str, float] = defaultdict(float)
        """Stream -> when computation began to use the last thing gathered on it."""
        self._pending: list[tuple[float, int, Collective, float]] = []
        """A heap of what is under way: the tick that needs it, a number that breaks ties, when it ends."""
        self._numbers = count()
        self._durations: dict[tuple[str, tuple[int, ...], int], float] = {}

    def compute(self, operation: Operation) -> None:
        """Run an operation as soon as the host has issued it and the main stream is free."""
        timing, found = self._timing, estimate(operation, self._cluster.device)
        self._host += found.host_seconds
        start = max(self._main, self._host)
        beside = max(0.0, min(max(self._streams.values(), default=0.0) - start, found.seconds))
        seconds = found.seconds + beside * self._cluster.device.efficiency.contention
        _add(timing.bounds, LATENCY, start - self._main)
        _add(timing.bounds, found.bound, seconds)
        _add(timing.kinds, found.kind, seconds)
        self._advance(start + seconds, operation.phase)
        if operation.flops and operation.phase in (FORWARD, BACKWARD) and not operation.recomputed:
            flops = timing.forward_flops if operation.phase == FORWARD else timing.backward_flops
            _add(flops, format_of(operation.dtype), operation.flops)

    def communicate(self, collective: Collective) -> None:
        """Run a collective: at once if the main stream waits for it there, else beside the computation."""
        timing, key = self._timing, key_of(collective)
        seconds = self._seconds(collective)
        _add(timing.communication, key, seconds)
        _add(timing.sent, key, collective.size)
        _add(timing.calls, key, 1)
        self._host += self._cluster.device.efficiency.host_us * 1e-6
        if collective.name in ("send", "recv"):  # a pipeline's schedule decides who waits
            return
        if collective.stream == MAIN_STREAM and (collective.needed or 0) <= collective.tick:
            end = max(self._main, self._host) + seconds
            _add(timing.exposed, key, end - self._main)
            self._advance(end, collective.phase)
            return
        start = max(self._ready(collective), self._streams[collective.stream], self._groups[collective.ranks])
        self._streams[collective.stream] = self._groups[collective.ranks] = start + seconds
        needed = inf if collective.needed is None else collective.needed
        heappush(self._pending, (needed, next(self._numbers), collective, start + seconds))

    def wait_until(self, tick: float) -> None:
        """Let the main stream wait for what is needed up to a tick."""
        while self._pending and self._pending[0][0] <= tick:
            _, _, collective, end = heappop(self._pending)
            self._wait(collective, end, UPDATE if tick == inf else collective.phase)

    def wait_for_gradients(self) -> None:
        """Let the optimizer wait for every reduction, whether or not the trace says so."""
        waited = [item for item in self._pending if item[2].phase == BACKWARD]
        if waited:
            self._pending = [item for item in self._pending if item[2].phase != BACKWARD]
            heapify(self._pending)
            for _, _, collective, end in waited:
                self._wait(collective, end, UPDATE)

    def _wait(self, collective: Collective, end: float, phase: str) -> None:
        _add(self._timing.exposed, key_of(collective), max(0.0, end - self._main))
        self._advance(max(self._main, end), phase)
        self._consumed[collective.stream] = self._main

    def finish(self) -> Timing:
        """Wait for everything, the host too, and return the timing."""
        self.wait_until(inf)
        _add(self._timing.bounds, LATENCY, max(0.0, self._host - self._main))
        self._timing.seconds = max(self._main, self._host)
        return self._timing

    def _ready(self, collective: Collective) -> float:
        """Return when a collective's inputs exist.

        Parameters exist before the step, so that they are gathered while the layer before still computes; not
        earlier, because only one layer ahead has memory. Gradients have to be computed first.
        """
        if collective.name == "all_gather" and collective.stream != MAIN_STREAM:
            return max(self._host, self._consumed[collective.stream])
        return max(self._host, self._main)

    def _seconds(self, collective: Collective) -> float:
        key = (collective.name, collective.ranks, collective.size)
        if key not in self._durations:
            self._durations[key] = collective_seconds(collective, self._cluster)
        return self._durations[key]

    def _advance(self, time: float, phase: str) -> None:
        _add(self._timing.phases, phase, time - self._main)
        self._main = time


def _add(sums: Sums, key: str, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def key_of(collective: Collective) -> str:
    """Return the key under which a collective is counted: its name and its axes."""
    return f"{collective.name} {collective.axis}"
