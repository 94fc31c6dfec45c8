"""The settings of one run for torchelastic, and how the run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ....errors import REQUEUE_EXIT_CODE
from ..verdict import Ending


class PortInUse(Exception):
    """The port is in use; the caller may try another one."""


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """The settings of one run for torchelastic."""

    command: tuple[str, ...]
    processes_here: int
    min_machines: int
    max_machines: int
    machine_rank: int
    address: str
    port: int
    backend: str
    rendezvous_settings: dict[str, str]
    local_address: str | None
    run_id: str
    role: str
    max_restarts: int
    survive: bool
    """Replace a process that ends, while the others continue."""
    monitor_interval: float
    grace_period: float
    log_dir: Path
    tee: str
    redirects: str
    line_prefix: str
    debug: bool
    is_rendezvous_host: bool = False
    """Whether this process hosts the rendezvous store."""

    @property
    def is_static(self) -> bool:
        """Whether machine ranks are fixed before the start."""
        return self.backend == "static"


@dataclass(kw_only=True)
class LocalOutcome:
    """How the processes of this machine ended."""

    endings: list[Ending] = field(default_factory=list)
    attempts: int = 1
    signal: int | None = None
    """The termination signal that the launcher received, if any."""
    machine_rank: int = 0
    """As assigned by the rendezvous; with `nnodes` it can change between attempts."""

    @property
    def asks_for_restart(self) -> bool:
        """Whether all processes saved and ended with the exit code that requests a restart."""
        codes = {ending.exit_code for ending in self.endings}
        return REQUEUE_EXIT_CODE in codes and codes <= {0, REQUEUE_EXIT_CODE}

    @property
    def failed(self) -> bool:
        """Whether any process failed."""
        return any(ending.failed for ending in self.endings)
