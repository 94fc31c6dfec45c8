"""How a replacement joins the members of a run.

[Note: joining] Replacements join between two steps. A request is one number in the next reduction, so that all members
see it in the same step. Before the next window they agree with the replacement, and one of them sends its state from
another thread. No parameter can change before the replacement has contributed to the next step, and so received
everything. If a member is lost meanwhile, the agreement is superseded, and the replacement asks again.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from time import sleep
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.membership.events import RETRACTED
from ...runtime.membership.member import SECONDS_BETWEEN_LOOKS, Agreement, MembershipChanged
from .recovery import JOINING, Recovery, stayed

logger = logging.getLogger(__name__)

SECONDS_TO_CONNECT = timedelta(seconds=30)
SECONDS_TO_TRANSFER = timedelta(hours=1)
"""Of the whole state; the loss of the other side is seen at once."""


class Joining:
    """Admit replacements to the members of a run, or join them as one."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.member = recovery.member
        recovery.strategy.between_steps = self.admit_waiting

    # --- the members --------------------------------------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Admit replacements that asked to join; called before the first micro-batch of a window."""
        if not self.recovery.sees_join:
            return
        if self.member.rank == self.member.members[0]:
            self.member.admit(self.member.waiting_ranks())
        self.member.wait_for_next_event()
        found = self.recovery.regroup()
        if not found.others_were_behind:  # else all change members with the next exchange
            self.recovery.change_members()
        if self.member.rank == min(self.member.counterparts(stayed(found.agreement))):
            self._send_state(found.agreement)

    def _send_state(self, agreement: Agreement) -> None:
        """Send everything to replacements, in the background; see [Note: joining]."""
        joining = [rank for rank in self.member.counterparts() if rank not in stayed(agreement)]
        if joining:
            content = self.recovery.state.capture(True)
            progress = self.recovery.exchanges, self.recovery.steps
            for rank in joining:
                words = agreement.epoch, rank, progress, content
                threading.Thread(target=self._send, args=words, daemon=True).start()

    def _send(self, epoch: int, rank: int, progress: tuple[int, int], content: bytes) -> None:
        store = self._transfer_store(epoch, rank)
        store.set("sends", "1")
        try:
            group: Any = dist.ProcessGroupGloo(store, 0, 2, SECONDS_TO_CONNECT)
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            group.send([torch.tensor([data.numel(), *progress])], 1, 0).wait(SECONDS_TO_TRANSFER)
            group.send([data], 1, 0).wait(SECONDS_TO_TRANSFER)
        except RuntimeError as error:
            logger.debug("Rank %d could not send its state to %d: %s", self.member.rank, rank, error)

    def _transfer_store(self, epoch: int, rank: int) -> Any:
        return dist.PrefixStore(f"transfer/{epoch}/{rank}", self.member.connect())  # type: ignore[attr-defined]

    # --- the replacement ----------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the members, and take the state of one of them."""
        recovery, number = self.recovery, self.member.events.newest()
        while True:
            number = self.member.ask_to_join(number)
            agreement = recovery.form_group(JOINING)
            try:
                with recovery.strategy.as_one():
                    exchanges, steps, content = self._receive(agreement, number)
            except RuntimeError as error:
                logger.debug("Rank %d did not receive the state: %s", self.member.rank, error)
            else:
                break
            recovery.strategy.runtime.leave_members(is_pending=True)
            if self.member.rank == self.member.replica[0]:
                self.member.events.publish("left", self.member.replica, RETRACTED)
        recovery.begin_with(agreement, exchanges, steps, content)
        self.member.has_joined = True

    def _receive(self, agreement: Agreement, number: int) -> tuple[int, int, bytes]:
        """Receive exchanges, steps and state of another member; raise as soon as a member is lost.

        `number` is the event by which this replacement has joined.
        """
        if agreement.epoch != number:
            raise MembershipChanged(f"Rank {self.member.rank}: a member was lost.")
        store = self._transfer_store(agreement.epoch, self.member.rank)
        while not store.check(["sends"]):
            self.member.require_all()
            sleep(SECONDS_BETWEEN_LOOKS)
        received: list[tuple[int, int, bytes]] = []
        # In a thread: gloo cannot be interrupted while it connects, and waits long for a sender that was killed.
        thread = threading.Thread(target=self._fetch, args=(store, received), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(SECONDS_BETWEEN_LOOKS)
            self.member.require_all()
        if not received:
            raise MembershipChanged(f"Rank {self.member.rank}: no state was received.")
        return received[0]

    def _fetch(self, store: Any, received: list[tuple[int, int, bytes]]) -> None:
        try:
            group: Any = dist.ProcessGroupGloo(store, 1, 2, SECONDS_TO_CONNECT)
            head = torch.zeros(3, dtype=torch.int64)
            group.recv([head], 0, 0).wait(SECONDS_TO_TRANSFER)
            length, exchanges, steps = head.tolist()
            data = torch.empty(length, dtype=torch.uint8)
            group.recv([data], 0, 0).wait(SECONDS_TO_TRANSFER)
            received.append((exchanges, steps, data.numpy().tobytes()))
        except RuntimeError as error:
            logger.debug("Rank %d did not receive the state: %s", self.member.rank, error)
