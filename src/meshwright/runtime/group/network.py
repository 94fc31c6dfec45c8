"""Find the addresses and interfaces of this machine, and listen at them. Sends no packets.

[Note: who can connect] What a run opens on one machine listens at the loopback address, where only processes of that
machine can connect. A run of several machines listens at the address that it was given for machine 0: with an address,
at that one only. A name says nothing about the interface by which the others come (their resolver may know another
address than this machine's), and an address may be that of something in front of this machine. Then, as torch's stores
always do, it listens at every address.
"""

from __future__ import annotations

import ipaddress
import socket

from ...config import environment
from ...errors import LaunchError

_EXTERNAL_ADDRESS = "192.0.2.1"
"""A reserved address (TEST-NET-1): the route to it is the default route."""


_MOST_WAITING = 4096
"""How many connections may wait to be accepted: all processes of a run connect at once."""


def loopback() -> str:
    """Return the address by which this machine reaches itself, of IPv4 if there is one."""
    reasons = []
    for address, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
                probe.connect(probe.getsockname())  # sends nothing; an interface that is down can be bound
        except OSError as error:
            reasons.append(f"{address}: {(error.strerror or str(error)).lower()}")
        else:
            return address
    raise LaunchError(
        f"This machine ({socket.gethostname()}) has no loopback address, by which its processes reach each other "
        f"({'; '.join(reasons)}). Bring it up: `ip link set lo up`."
    )


def listen(address: str, port: int) -> socket.socket:
    """Listen on a port (0: any free one) of this machine; see [Note: who can connect]."""
    own = loopback() if address == "localhost" else address
    if _is_one_address(own) and (is_loopback(own) or is_local_address(own)):
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, port), family=family, backlog=_MOST_WAITING)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=_MOST_WAITING)


def _is_one_address(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address.partition("%")[0]).is_unspecified
    except ValueError:  # a name
        return False


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
    return next((name for own, name in _own_addresses(with_loopback=True) if own == local), None)


def loopback_variables() -> dict[str, str]:
    """Return the variables with which gloo listens at the loopback address, unless the user chose an interface.

    For processes of one machine: gloo would take the address of the host's own name.
    """
    interface = None if environment.read("GLOO_SOCKET_IFNAME") else interface_towards(loopback())
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}


def _own_addresses(with_loopback: bool = False) -> list[tuple[str, str]]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (item.address, name)
        for name, addresses in psutil.net_if_addrs().items()
        for item in addresses
        if item.family in families and (with_loopback or not is_loopback(item.address))
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
    with listen(loopback(), 0) as probe:
        return int(probe.getsockname()[1])


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a process of this machine listens on a port (default: 29500)."""
    address = loopback()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        return probe.connect_ex((address, 29500 if port is None else int(port))) == 0
