"""Where the launchers of a run meet, and the stores for the processes that they start.

[Note: stores of attempts] torch's static rendezvous lets the processes of every attempt use one store, in which those
that are started again find stale addresses and hang; its agents do not recover either when the machine is lost that
hosts such a store. So the processes of every attempt get a new store on a new port, which the launcher with rank 0 in
that attempt hosts. Only a run that is never started again shares the one of the launchers: it needs one port.

The launchers host all stores, never the processes: then what listens, and where, does not depend on the script.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ....config.environment import patch_environment
from ....runtime.group.stores import host_store

NAME = "meshwright"
"""Of `make_rendezvous` among torch's backends, for launches by torch's own functions."""
_SECONDS_TO_READ = 60
_SECONDS_TO_MEET = 900


def make_rendezvous(parameters: RendezvousParameters, *, is_host: bool, restarts: bool) -> RendezvousHandler:
    """Return the rendezvous of torch that `parameters` ask for, with stores that listen where the run needs them."""
    address, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    if parameters.backend == "static":
        timeout = int(parameters.config.get("timeout", _SECONDS_TO_MEET))
        static = _Static(address, port, parameters.config["rank"], parameters.max_nodes, parameters.run_id, timeout)
        return _Rendezvous(static, hosts_at=address if restarts else None)
    server = None
    if parameters.backend == "c10d" and parameters.get("store_type", "tcp") == "tcp":
        if parameters.get_as_bool("is_host", is_host):
            seconds = timedelta(seconds=parameters.get_as_int("read_timeout", _SECONDS_TO_READ) or _SECONDS_TO_READ)
            with suppress(DistNetworkError):  # another launcher on this machine hosts it
                server = host_store(address, port, seconds)
                parameters.endpoint = f"[{address}]:{server.port}"
        parameters.config["is_host"] = False
    own = parameters.local_addr or socket.getfqdn()
    return _Rendezvous(get_rendezvous_handler(parameters), hosts_at=own, server=server)


def register() -> None:
    """Let torch's own launch functions find `make_rendezvous` under `NAME`."""
    rendezvous_handler_registry.register(NAME, _make_registered)


def _make_registered(parameters: RendezvousParameters) -> RendezvousHandler:
    asked = RendezvousParameters(
        parameters.config["kind"],
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        **{name: value for name, value in parameters.config.items() if name not in ("kind", "options")},
    )
    return make_rendezvous(asked, **parameters.config["options"])


class _Static(StaticTCPRendezvous):
    """torch's static rendezvous, whose store listens at the given address, with a prefix for every attempt."""

    attempts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None and self.rank == 0:
            store = host_store(self.master_addr, self.master_port, self.timeout, waits_for=self.world_size)
            self._store, self.master_port = store, store.port
        found: Any = super().next_rendezvous()  # torch annotates the place as one that may be None
        self.attempts += 1
        store = PrefixStore(f"attempt_{self.attempts}", found.store)
        return RendezvousInfo(store, found.rank, found.world_size, found.bootstrap_store_info)


class _Rendezvous(RendezvousHandler):
    """Another rendezvous, with the stores that this launcher hosts; see [Note: stores of attempts]."""

    def __init__(self, inner: RendezvousHandler, *, hosts_at: str | None, server: Any = None) -> None:
        self._inner = inner
        self._hosts_at = hosts_at
        """Where the processes of an attempt get a store of their own; None if they share that of the launchers."""
        self._server = server
        self._of_attempt: Any = None

    def next_rendezvous(self) -> RendezvousInfo:
        with patch_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):  # torch would host one, at every address
            found = self._inner.next_rendezvous()
        if self._hosts_at is None:
            return found
        port = None
        if found.rank == 0:
            self._of_attempt = host_store(self._hosts_at, 0, timedelta(seconds=_SECONDS_TO_MEET))
            port = self._of_attempt.port
        place = RendezvousStoreInfo.build(found.rank, PrefixStore("processes", found.store), self._hosts_at, port)
        return RendezvousInfo(found.store, found.rank, found.world_size, place)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return NAME

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()
