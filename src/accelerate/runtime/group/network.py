"""Find the addresses and interfaces of this machine. Queries the kernel and the resolver; sends no packets."""

from __future__ import annotations

import ipaddress
import socket

_EXTERNAL_ADDRESS = "192.0.2.1"
"""A reserved address (TEST-NET-1): the route to it is the default route."""


def is_local_address(address: str) -> bool:
    """Return whether a host name or an address belongs to this machine."""
    if address == socket.gethostname():
        return True
    for family, kind, *_, target in _resolve(address):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((target[0], 0, *target[2:]))
            except OSError:
                continue
            return True
    return False


def local_address_towards(address: str) -> str | None:
    """Return the address under which the other machines reach this one, for a rendezvous at `address`."""
    found = _source_address_towards(address)
    if found is None or not is_loopback(found) or is_loopback(address):
        return found
    # Many systems resolve their own name to a loopback address, which other machines cannot reach.
    return _source_address_towards(_EXTERNAL_ADDRESS) or next((own for own, _ in _own_addresses()), found)


def interface_towards(address: str) -> str | None:
    """Return the network interface towards the other machines, for a rendezvous at `address`."""
    local = local_address_towards(address)
    return next((name for own, name in _own_addresses(loopback=True) if own == local), None)


def _own_addresses(loopback: bool = False) -> list[tuple[str, str]]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (item.address, name)
        for name, addresses in psutil.net_if_addrs().items()
        for item in addresses
        if item.family in families and (loopback or not is_loopback(item.address))
    ]


def _source_address_towards(address: str) -> str | None:
    for family, kind, *_, target in _resolve(address):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _resolve(address: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    try:
        return socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except OSError:
        return []


def is_loopback(address: str) -> bool:
    """Return whether an address is this machine as seen by itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def get_free_port() -> int:
    """Return a port that is free now. Another process may bind it first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a process of this machine listens on a port (default: 29500)."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 29500 if port is None else int(port))) == 0
