"""Which addresses of this machine are listened at."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.runtime.group.network import interface_towards, listen, loopback
from meshwright.runtime.group.stores import host_store
from tests.clusters.machines import why_not
from tests.ranks.pool import free_port
from tests.strangers import strangers
from tests.timing import limit

SECONDS = timedelta(seconds=20)
in_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_at_the_address_that_is_asked_for(address: str) -> None:
    with listen(address, 0) as server:
        assert server.getsockname()[0] == ("127.0.0.1" if address == "localhost" else address)
        with socket.create_connection((address, server.getsockname()[1]), timeout=5):
            pass


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "a-name-of-this-machine", "192.0.2.7"])
def test_at_every_address_where_none_of_this_machine_is_named(address: str) -> None:
    with listen(address, 0) as server:
        for own in ("127.0.0.1", "::1"):
            with socket.create_connection((own, server.getsockname()[1]), timeout=5):
                pass


def test_a_store_is_not_delayed_by_a_thousand_strangers() -> None:
    store = host_store("127.0.0.1", 0, SECONDS)
    with strangers([("127.0.0.1", store.port)], 1000):
        store.set_timeout(timedelta(seconds=limit(5)))
        client = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=limit(5)), wait_for_workers=False)
        client.set("key", "value")
        assert store.get("key") == b"value"


def test_a_port_that_is_in_use_is_named() -> None:
    port = free_port()
    with listen("127.0.0.1", port), pytest.raises(dist.DistNetworkError, match=rf"at 127.0.0.1, port {port}: address "):
        host_store("127.0.0.1", port, SECONDS)


def in_a_namespace(prepare: str, program: str) -> str:
    command = ["unshare", "--net", "sh", "-c", f'{prepare}; exec {sys.executable} -c "$0"', program]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit(60), check=True).stdout


@in_namespaces
def test_without_ipv4_the_loopback_address_is_that_of_ipv6() -> None:
    program = (
        "from meshwright.runtime.group.network import *; print(loopback(), interface_towards(loopback()), "
        "get_free_port() > 0, is_port_in_use(1))"
    )
    assert in_a_namespace("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", program) == "::1 lo True False\n"


@in_namespaces
@pytest.mark.parametrize("prepare", ["ip link set lo down", "ip link set lo up; ip addr flush dev lo"])
def test_a_machine_without_a_loopback_address_is_told_in_a_sentence(prepare: str) -> None:
    program = (
        "from meshwright.runtime.group.network import *\ntry: loopback()\nexcept RuntimeError as error: print(error)"
    )
    said = in_a_namespace(prepare, program)
    assert said.startswith(f"This machine ({socket.gethostname()}) has no loopback address, by which its processes ")
    assert said.endswith("Bring it up: `ip link set lo up`.\n")


def test_the_loopback_address_has_an_interface() -> None:
    assert shutil.which("ip") is None or interface_towards(loopback()) == "lo"
