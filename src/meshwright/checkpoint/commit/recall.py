"""Take a run up from its copies in memory: find the newest that is complete, fetch what a machine lacks, restore."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..formats import codec
from ..group import CheckpointGroup
from ..parts.states import Part, ProgressPart
from ..parts.transfer import DerivedRandomPart
from ..storage.memory import GENERATORS, STATE, CopyFolder, CopyRecord
from .copies import CopyPlacement, MemoryCopies, facts_of, received, sent
from .engine import CheckpointError, LoadReport, part_errors

logger = logging.getLogger(__name__)

Key = tuple[str, int]
_DERIVED = "generators are derived"


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank knows before a recall."""

    machine: int
    owner: int
    records: Sequence[CopyRecord]
    """The copies of the machine; only its first rank lists them."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A file that a machine lacks, from another one that has it."""

    record: CopyRecord
    source: int
    target: int


class Inventory:
    """The copies on all machines; the same on every rank."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self.holdings = holdings
        self.num_processes = len(holdings)
        self.machines: dict[int, dict[int, dict[Key, CopyRecord]]] = {holding.machine: {} for holding in holdings}
        """First rank of a machine -> step -> what a file holds -> its record."""
        self.other_worlds: set[int] = set()
        for holding in holdings:
            for record in holding.records:
                if record.num_processes == self.num_processes:
                    self.machines[holding.machine].setdefault(record.step, {})[record.key] = record
                else:
                    self.other_worlds.add(record.num_processes)

    def complete_steps(self) -> list[int]:
        """Return the steps of which every state is on some machine, the newest first."""
        wanted = {(STATE, holding.owner) for holding in self.holdings}
        steps = {step for of_machine in self.machines.values() for step in of_machine}
        return sorted((step for step in steps if wanted <= set(self._everywhere(step))), reverse=True)

    def _everywhere(self, step: int) -> dict[Key, tuple[int, CopyRecord]]:
        """Return one machine that has it for each file of a step, and its record."""
        return {
            key: (machine, record)
            for machine, of_machine in reversed(self.machines.items())
            for key, record in of_machine.get(step, {}).items()
        }

    def transfers(self, step: int) -> list[Transfer]:
        """Return what machines lack of a step, in an order that is the same on every rank."""
        found = self._everywhere(step)
        return [
            Transfer(record=found[key][1], source=found[key][0], target=machine)
            for machine, of_machine in self.machines.items()
            for key in self._wanted_by(machine)
            if key in found and key not in of_machine.get(step, {})
        ]

    def _wanted_by(self, machine: int) -> Iterator[Key]:
        ranks = [rank for rank, holding in enumerate(self.holdings) if holding.machine == machine]
        yield from ((STATE, owner) for owner in sorted({self.holdings[rank].owner for rank in ranks}))
        yield from ((GENERATORS, rank) for rank in ranks)


def recall(copies: MemoryCopies, disk_step: int | None, load_options: dict[str, Any]) -> LoadReport | None:
    """Restore the newest complete copy; return None if there is none, or if a checkpoint on disk is as new.

    All ranks call it. Copies that are not restored are deleted: the run leaves their path.
    """
    group, place = copies.run.group(), CopyPlacement.of(copies.run.runtime, copies.run.strategy)
    is_first = place.rank == place.machine
    own = Holding(machine=place.machine, owner=place.owner, records=copies.folder.records() if is_first else [])
    inventory = Inventory(group.gather(own))
    report = None
    for step in inventory.complete_steps():
        if disk_step is not None and step <= disk_step:
            break
        report = _restored(copies, inventory, step, group, place, load_options)
        if report is not None:
            break
    _say(inventory, report, disk_step, is_main=copies.run.runtime.is_main_process)
    group.gather(None)  # nobody reads any more
    if is_first:
        copies.folder.keep_only(None if report is None else report.step)
    return report


def _restored(
    copies: MemoryCopies,
    inventory: Inventory,
    step: int,
    group: CheckpointGroup,
    place: CopyPlacement,
    load_options: dict[str, Any],
) -> LoadReport | None:
    """Restore one copy on all ranks, or on none if it is damaged; raise if it does not match what was prepared."""
    problem = _fetched(copies.folder, inventory.transfers(step), place, group)
    group.gather(None)  # the files of this machine are there
    parts = copies.run.parts()
    states: dict[str, Any] = {}
    try:
        states = _states(copies.folder, step, place, parts[-1].name, load_options)
    except (OSError, ValueError, KeyError) as error:
        problem = problem or str(error)
    derives = states.pop(_DERIVED, False)
    if derives:
        parts[-1] = DerivedRandomPart.like(parts[-1])
    answers = group.gather((problem, None if problem else _mismatch(parts, states), derives))
    mismatches = [text for _, text, _ in answers if text]
    if mismatches:
        raise CheckpointError(
            f"The copy of step {step} in memory, in {copies.folder.path}, does not match what was prepared: "
            f"{mismatches[0]}. Nothing was changed. Delete that folder to go on without its copies."
        )
    problems = [text for text, _, _ in answers if text]
    if problems:
        if copies.run.runtime.is_main_process:
            logger.warning("The copy of step %d in memory is not used: %s.", step, problems[0])
        return None
    for part in parts:
        with part_errors(part, "could not be restored"):
            part.restore(states.pop(part.name))
    ranks = [rank for rank, (_, _, is_derived) in enumerate(answers) if is_derived]
    changes = [f"The generators of ranks {ranks} were derived from those of another rank."] if ranks else []
    return LoadReport(path=f"{copies.folder.path} (memory)", step=step, changes=changes)


def _fetched(
    folder: CopyFolder, transfers: Sequence[Transfer], place: CopyPlacement, group: CheckpointGroup
) -> str | None:
    """Carry out the transfers of this rank, and return why one of them failed."""
    problem = None
    for transfer in transfers:
        try:
            _carry_out(transfer, folder, place, group)
        except (OSError, ValueError) as error:
            problem = str(error)
    return problem


def _states(
    folder: CopyFolder, step: int, place: CopyPlacement, generators: str, load_options: dict[str, Any]
) -> dict[str, Any]:
    """Read the states of all parts; without generators of this rank, those of another one, and a mark."""
    records = {record.key: record for record in folder.records() if record.step == step}
    states: dict[str, Any] = _read(folder, records[STATE, place.owner], load_options)
    own = records.get((GENERATORS, place.rank))
    if own is None:
        return {**states, _DERIVED: True}
    return {**states, generators: _read(folder, own, load_options)}


def _carry_out(transfer: Transfer, folder: CopyFolder, place: CopyPlacement, group: CheckpointGroup) -> None:
    record = transfer.record
    if place.rank == transfer.source:
        sent(folder.file_of(record), record, transfer.target, group.process_group)
    elif place.rank == transfer.target:
        folder.put(
            record.kind,
            record.owner,
            record.step,
            record.num_processes,
            lambda path: received(path, record, transfer.source, group.process_group),
        )


def _read(folder: CopyFolder, record: CopyRecord, load_options: dict[str, Any]) -> Any:
    path = folder.file_of(record)
    if facts_of(path) != record.facts:
        raise ValueError(f"{path} is damaged: its checksum differs from the recorded one")
    return codec.read(path, **load_options)


def _mismatch(parts: Sequence[Part], states: dict[str, Any]) -> str | None:
    """Return why states do not match the parts, or None."""
    names = {part.name for part in parts}
    if names != states.keys():
        return f"only one of them has {', '.join(sorted(names ^ states.keys()))}"
    for part in parts:
        if isinstance(part, ProgressPart):
            part.seeks = True
        objection = part.objection(states[part.name])
        if objection is not None:
            return f"{part.name}: {objection}".replace("the checkpoint", "the copy")
    return None


def _say(inventory: Inventory, report: LoadReport | None, disk_step: int | None, *, is_main: bool) -> None:
    if not is_main:
        return
    if inventory.other_worlds:
        logger.warning(
            "Copies in memory of %s processes are not used, and are deleted: this run has %d.",
            " and ".join(map(str, sorted(inventory.other_worlds))),
            inventory.num_processes,
        )
    if report is None or report.step is None:
        return
    on_disk = "" if disk_step is None else f", {report.step - disk_step} steps after the newest checkpoint on disk"
    fetched = sorted({transfer.target for transfer in inventory.transfers(report.step)})
    elsewhere = f"; the machines of ranks {fetched} got it from their neighbours" if fetched else ""
    logger.warning("Resumed from memory: step %s%s%s.", report.step, on_disk, elsewhere)
    for change in report.changes:
        logger.warning("%s", change)
