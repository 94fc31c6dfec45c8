"""What a program does that has found the ports of a run, and who listens where."""

from __future__ import annotations

import ipaddress
import os
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

_MAGIC = (0x3C85F7CE).to_bytes(4, "little")  # the first message of torch's store
_CLIENT = b"\x00" + _MAGIC + (1234).to_bytes(4, "little")
GARBAGE = (
    os.urandom(5000),
    b"\xff" * 64,
    b"GET / HTTP/1.0\r\n\r\n",
    b"[" * 4000 + b"\n",
    pickle.dumps({"rank": 0}),
    (2**62).to_bytes(8, "little") + b"x",
    _CLIENT + b"\x01" + (2**60).to_bytes(8, "little"),
    _CLIENT + b"\xee" * 100,
)


def listening(pid: int) -> dict[tuple[str, int], int]:
    """Return the addresses and ports at which a process and those that it has started listen, each with a process."""
    root = psutil.Process(pid)
    found = {}
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            for item in process.net_connections("tcp"):
                if item.status == psutil.CONN_LISTEN:
                    found[item.laddr.ip, item.laddr.port] = process.pid
    return found


def beyond_loopback(pid: int) -> list[tuple[str, int]]:
    """Return where a process and those that it has started listen for other machines."""
    return [place for place in listening(pid) if not ipaddress.ip_address(place[0]).is_loopback]


@contextmanager
def strangers(places: list[tuple[str, int]], connections: int) -> Iterator[None]:
    """Say garbage at every port, and inside the block keep connections open that say nothing, or few bytes."""
    with ExitStack() as stack:
        slow = []
        for place in places:
            for words in GARBAGE:
                with suppress(OSError), socket.create_connection(place, timeout=5) as link:
                    link.sendall(words)
            for _ in range(connections):
                with suppress(OSError):
                    slow.append(stack.enter_context(socket.create_connection(place, timeout=5)))
        for _ in range(3):
            for link in slow[:: max(connections // 10, 1)]:
                with suppress(OSError):
                    link.send(b"\x00")
            time.sleep(0.1)
        yield
