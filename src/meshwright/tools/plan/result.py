"""What a plan says, as plain data: `Plan`. `plan` fills it, `report` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .ledger import LedgerRow
from .memory.fit import Fit
from .memory.levers import MemoryOption
from .memory.peak import Memory

if TYPE_CHECKING:
    from .timing.rates import Rates
    from .timing.step import Timing


@dataclass
class RankPlan:
    """One rank that was traced; others of the same stage do the same."""

    rank: int
    stage: int
    memory: Memory
    ledger: list[LedgerRow]
    timing: Timing | None = None


@dataclass
class RunCost:
    """What a run of a certain length takes."""

    steps: int
    tokens: int
    hours: float
    low: float
    high: float
    """Bounds of the hours."""
    devices: int
    price: float | None = None
    """Of one device for one hour, as the user gave it."""

    @property
    def device_hours(self) -> float:
        """Return the hours of all devices together."""
        return self.hours * self.devices

    @property
    def money(self) -> float | None:
        """Return the price of the run, in the unit of the user's price."""
        return None if self.price is None else self.device_hours * self.price


@dataclass
class Candidate:
    """One way to spread the run that a search tried."""

    axes: dict[str, int]
    micro_batch: int
    settings: dict[str, Any]
    """Options of `meshwright launch`, by name."""
    allocated: float
    reserved: float
    fits: bool
    rates: Rates | None = None
    command: str = ""
    yaml: str = ""
    changes: list[str] = field(default_factory=list)
    """What has to be changed in the script itself."""
    accumulation: int = 1
    labels: list[str] = field(default_factory=list)
    """What distinguishes it besides mesh and batch, in a word or two each."""


@dataclass
class Plan:
    """Everything that a plan says."""

    script: str
    cluster: str
    """As the user wrote it, such as `64xH100`."""
    world_size: int
    axes: dict[str, int]
    parameters: int
    trained_parameters: int
    ranks: list[RankPlan]
    blocks: int = 0
    """Repeated blocks that were traced, and below how many the model has."""
    all_blocks: int = 0
    schedule: str = ""
    microbatches: int = 1
    bubble: float = 0.0
    """Part of the step in which a pipeline's stage waits for others."""
    samples: int = 0
    """Of a step, on all ranks, and below their tokens."""
    tokens: int = 0
    fits: list[Fit] = field(default_factory=list)
    """The devices of the cluster first."""
    levers: list[MemoryOption] = field(default_factory=list)
    rates: Rates | None = None
    cost: RunCost | None = None
    candidates: list[Candidate] = field(default_factory=list)
    """The best first."""
    guesses: list[str] = field(default_factory=list)
    planned_in: float = 0.0
    """Seconds."""

    @property
    def largest(self) -> RankPlan:
        """Return the rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: max(rank.memory.total, rank.memory.setup))

    @property
    def slowest(self) -> RankPlan:
        """Return the rank whose own work takes longest."""
        return max(self.ranks, key=lambda rank: rank.timing.seconds if rank.timing is not None else 0.0)
