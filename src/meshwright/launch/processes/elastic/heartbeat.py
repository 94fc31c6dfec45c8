"""Heartbeats of the launchers of several machines: one that sends none is lost, and its processes with it.

Machine 0, which hosts the store, watches the others. A machine that was given up stays out: its launcher ends when it
finds that out, so that a machine that was only cut off cannot write into a run that went on without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ....runtime.membership.events import Events, connect
from ....runtime.membership.heartbeat import SECONDS_BETWEEN_HEARTBEATS, Heartbeats, pause


class LauncherHeartbeat:
    """A thread that sends heartbeats and, on machine 0, looks for those of the others."""

    def __init__(
        self, address: str, *, machine: int, machines: int, replicas: int, on_lost: Callable[[int], object]
    ) -> None:
        self.is_given_up = False
        """The others went on without this machine."""
        self._store = connect(address)
        self._events = Events(self._store, replicas)
        self._machine = machine
        self._pause = pause(SECONDS_BETWEEN_HEARTBEATS, 3 * machines)  # a heartbeat, a question, and a look at each
        self._per_machine = replicas // machines
        self._on_lost = on_lost
        self._heartbeats = Heartbeats(self._store, "launcher", range(1, machines) if machine == 0 else ())
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stopped.set()

    def _run(self) -> None:
        from torch.distributed import DistError

        try:
            while not self._stopped.wait(self._pause):
                self._heartbeats.send(self._machine)
                self.is_given_up = bool(self._store.check([f"lost/{self._machine}"]))
                for machine in self._heartbeats.silent():
                    self._give_up(machine)
        except DistError:  # machine 0 has ended
            return

    def _give_up(self, machine: int) -> None:
        self._heartbeats.forget(machine)
        self._store.set(f"lost/{machine}", "1")
        there = range(machine * self._per_machine, (machine + 1) * self._per_machine)
        members = self._events.members(self._events.newest())
        if ranks := [rank for rank in there if rank in members]:
            self._events.publish("left", ranks, f"no heartbeat from machine {machine}")
        self._on_lost(machine)
