"""Host the stores by which the processes of a run find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from .network import listen


def host_store(address: str, port: int, timeout: timedelta, *, waits_for: int | None = None) -> Any:
    """Open torch's store on a port (0: any free one), listening where [Note: who can connect] says.

    With `waits_for` it returns when that many have connected, this process included. torch's own would listen at every
    address; and it asks the name server for the name of each that connects, for seconds where there is none.
    """
    try:
        server = listen(address, port)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DistNetworkError(
            f"The store of this run cannot listen at {address}, port {port}: {reason}. Another run may hold the port "
            f"(`ss -ltnp 'sport = :{port}'` says who)."
        ) from error
    return TCPStore(
        address,
        server.getsockname()[1],
        waits_for,
        is_master=True,
        timeout=timeout,
        wait_for_workers=waits_for is not None,
        master_listen_fd=server.detach(),
    )
