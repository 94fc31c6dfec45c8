"""What the members of a run do when one is lost."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import ReplicaLostError, ReplicaMismatchError, UnsupportedSettingError
from ...runtime.loop.gradient_state import GradientState
from ...runtime.membership.member import Agreement, MembershipChanged, now
from ...untrusted import build
from .surviving import SurvivingReplicas

T = TypeVar("T")
logger = logging.getLogger(__name__)

JOINING = -1
"""The number of exchanges of a replacement, before it has the state of a member."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a member tells the others when they form a group."""

    exchanges: int
    """How many it has completed."""
    stepped: bool
    """Whether its optimizer has stepped in the last of them."""


# [Note: exchanges are transactions]
# Members exchange data in the reduction of a step, and in collectives of the script: gather, reduce, broadcast,
# barrier. All of them make the same exchanges in the same order. In health nobody votes: a member that has the result
# of exchange n knows that everybody contributed, and goes on. It needs everybody again for exchange n + 1, so no member
# can be more than one ahead of another. When a member is lost, the survivors compare how many they have completed:
# - All the same: nobody has the result. The exchange is repeated among the survivors. If it is a step, the gradients
#   are still local: the samples of the lost member are assigned to the survivors as further micro-batches of the
#   same window, whose last one reduces again. The same holds for the batch of an evaluation.
# - Some are one ahead: the exchange took place, with the data of the lost member. The others take its result from one
#   that is ahead. For a step these are parameters, moments and gradients, and they leave out the optimizer step if that
#   member has made it.
#
# [Note: when samples are assigned to other members]
# Loaders must change their members at the same place of the loop on all of them. It is the exchange that no survivor
# has completed. Those that were behind have not reached it yet: they go on with the samples that they would have had,
# and change members there, as the others did. So a micro-batch that a member has begun never becomes void.


@dataclass(frozen=True, kw_only=True)
class State:
    """How the state of a run is read and written; by the Accelerator."""

    loaders: Sequence[Any]
    gradient_state: GradientState
    capture: Callable[[bool], bytes]
    """Return the state: with True everything, else models and optimizers with their gradients."""
    restore: Callable[[bytes], None]


@dataclass(frozen=True, kw_only=True)
class Regrouping:
    """How this member came into a new process group."""

    agreement: Agreement
    was_behind: bool
    """Another member had completed the exchange. Its result was received."""
    others_were_behind: bool


class Recovery:
    """Complete exchanges among members although some are lost, and assign the samples of those to the others."""

    def __init__(self, strategy: SurvivingReplicas, state: State) -> None:
        self.strategy = strategy
        self.member = strategy.member
        self.state = state
        self.exchanges = 0
        """How many this member has completed, from the first step on. Before it, the launcher restarts everybody."""
        self.steps = 0
        """How many of them were steps."""
        self.is_prepared = False
        """The script has called `resume()`, where a replacement joins."""
        self.sees_join = False
        """A replacement asked to join before the next window; all members know it from the last step."""
        self._result: Any = None  # of the last exchange, if it was no step
        self._was_step = True
        self._has_stepped = True
        self._step_was_copied = False
        self._is_exchanging = False
        self._agreement: Agreement | None = None  # whose members the loaders do not know yet
        strategy.begin_closing, strategy.close_step = self.begin_closing, self.close_step
        strategy.transaction = self
        self._lead_collectives()

    def _lead_collectives(self) -> None:
        runtime = self.strategy.runtime
        if runtime.recovery is not None and runtime.recovery.is_prepared:
            raise UnsupportedSettingError(
                "--survive with two Accelerators",
                "the members of a run compare their progress by the steps and collectives of one.",
                "Prepare all models and optimizers with the first Accelerator.",
            )
        runtime.recovery = self

    # --- the step ---------------------------------------------------------------------------------------------------

    def close_step(self) -> None:
        """Reduce the gradients of a window; after a loss, prepare to compute what is missing."""
        again = False
        while True:
            try:
                requests = self.strategy.reduce(float(self.member.sees_request()), number=self.steps, again=again)
            except ReplicaMismatchError:  # and no majority tells who is right
                raise
            except RuntimeError as error:
                again = self._recover(error)
                if not again:
                    return
            else:
                self._commit()
                self.sees_join = requests > 0
                return

    def begin_closing(self) -> bool:
        """Before the backward pass that closes a window, return whether it does so among the present members."""
        self._require_resume()
        return self.change_members()

    def _require_resume(self) -> None:
        if not self.is_prepared:
            raise UnsupportedSettingError(
                "--survive in a script that does not call accelerator.resume()",
                "a replacement takes the state of the others, and joins them, in that call.",
                "Call it after prepare(), and begin the loop over epochs with the loader's `iteration`.",
            )

    def may_step(self) -> bool:
        """Return whether optimizers step, and take note of it; False if their step was copied from another member."""
        self._has_stepped = True
        self.strategy.release_gradients()
        return not self._step_was_copied

    def may_zero_grad(self) -> bool:
        """Return whether gradients may be zeroed: not while they belong to a window that is open."""
        return not self.strategy.has_open_gradients

    def _commit(self) -> None:
        if self.exchanges == 0:
            self.member.events.mark_begun()
        self._complete(None, is_step=True)
        self._has_stepped = self._step_was_copied = False
        active = self.state.gradient_state.active_dataloader
        if active is not None:
            active.commit()

    def _recover(self, error: RuntimeError) -> bool:
        """Form a group without the lost members; return whether the same gradients can be reduced again."""
        self.member.learn_of_loss()
        return not self.regroup(error).was_behind and self.change_members()

    # --- collectives of the script ----------------------------------------------------------------------------------

    def run_collective(self, collective: Callable[[], T], *, source: int | None = None, carries_data: bool = True) -> T:
        """Run a collective of all members; if one is lost meanwhile, again with those that are left.

        Args:
            collective: What is run. It reads the number of processes itself.
            source: The rank whose data all others receive, if it is only one.
            carries_data: Whether members learn anything but that the others have come.
        """
        if self.exchanges == 0 or self._is_exchanging:
            return collective()
        origin = None if source is None else self.member.members[source]
        self._is_exchanging = True
        try:
            self.change_members()
            while True:
                try:
                    result = self._attempt(collective, confirms=source is not None)
                except RuntimeError as error:
                    if not self.member.hears_of_loss():
                        raise
                    if self.regroup(error).was_behind:
                        result = self._result
                        break
                    if carries_data:
                        self._require_values_of_lost(origin)
                    self.change_members()
                else:
                    self._complete(result, is_step=False)
                    break
            if carries_data:
                for loader in self._loaders():
                    loader.elastic.collect()
            return result
        finally:
            self._is_exchanging = False

    def _attempt(self, collective: Callable[[], T], *, confirms: bool) -> T:
        with self.strategy.as_one(), self.member.interrupting_collectives():
            result = collective()
            if confirms and len(self.member.members) > 1:  # the source of a broadcast does not know who received it
                dist.barrier()
        return result

    def _require_values_of_lost(self, origin: int | None) -> None:
        """Raise if the values of a lost member are neither computed again nor known to another one."""
        active = self.state.gradient_state.active_dataloader
        if origin is not None:
            if origin in self.member.members:
                return
            what = f"Rank {origin} was lost before the others received what it broadcast"
        elif any(loader.elastic.has_local_results for loader in self._loaders()):
            what = "A replica was lost together with its results of an evaluation that were not gathered batch by batch"
        elif active is not None and not active.elastic.trains and active.elastic.is_collected:
            what = "A replica was lost between two collectives for the same batch of an evaluation"
        else:
            return
        raise ReplicaLostError(
            f"{what}. This process goes no further, because its metric would be wrong. Gather all results of a batch "
            "with one gather_for_metrics((first, second)): then the samples of a lost replica are evaluated by others."
        )

    def retry(self, action: Callable[[], T]) -> T:
        """Run something that is no exchange, but waits for one member; after the loss of that one, again."""
        if self.exchanges == 0:
            return action()
        self.change_members()
        while True:
            try:
                return action()
            except MembershipChanged as error:
                self.regroup(error)
                self.change_members()

    # --- a loss -----------------------------------------------------------------------------------------------------

    def regroup(self, error: RuntimeError | None = None) -> Regrouping:
        """Form the group of the present members, after a failed collective if there was one."""
        began = now()
        while True:
            agreement = self.form_group(self.exchanges, error)
            try:
                found = self._catch_up(agreement)
            except RuntimeError as another:
                self.member.learn_of_loss()
                error = another
            else:
                self._agreement = agreement
                self._report(agreement, began)
                return found

    def form_group(self, exchanges: int, error: RuntimeError | None = None) -> Agreement:
        """Leave the group, and form another one with all present members."""
        if error is not None:
            logger.debug("Rank %d leaves a collective: %s", self.member.rank, error)
        self.strategy.runtime.leave_members(is_pending=isinstance(error, MembershipChanged))
        status = Status(exchanges=exchanges, stepped=self._has_stepped)
        agreement = self.strategy.runtime.form_group(asdict(status))
        self.strategy.bind_to_new_group()
        self.sees_join = False
        return agreement

    def _report(self, agreement: Agreement, began: float) -> None:
        """Log a change of members, on one of those that stayed."""
        if self.member.rank != min(stayed(agreement)):
            return
        seconds = now() - began
        self.member.add_lost_time(seconds)
        logger.warning(
            "%d of %d replicas go on after %.2f s: %s.",
            self.member.count_replicas(len(agreement.members)),
            self.member.count_replicas(self.member.replicas),
            seconds,
            "; ".join(self.member.changes(agreement)),
        )

    def _catch_up(self, agreement: Agreement) -> Regrouping:
        """Give the members that are behind the result of the last exchange."""
        done = stayed(agreement)
        newest = max(done.values())
        if min(done.values()) == newest:
            return Regrouping(agreement=agreement, was_behind=False, others_were_behind=False)
        is_step = self._was_step if self.exchanges == newest else not self._is_exchanging
        group = self.strategy.counterparts if is_step else None
        ahead = [rank for rank, number in done.items() if number == newest]
        source = min(self.member.counterparts(ahead) if is_step else ahead)
        content = [self._last_exchange() if source == self.member.rank else b""]
        with self.strategy.as_one(), self.member.interrupting_collectives():
            dist.broadcast_object_list(content, src=agreement.members.index(source), group=group)
        was_behind = self.exchanges < newest
        if was_behind:
            self._take_exchange(content[0], _status(agreement, source) if is_step else None)
        return Regrouping(agreement=agreement, was_behind=was_behind, others_were_behind=not was_behind)

    def _last_exchange(self) -> bytes:
        if self._was_step:
            return self.state.capture(False)
        buffer = io.BytesIO()
        torch.save(self._result, buffer)
        return buffer.getvalue()

    def _take_exchange(self, content: bytes, step_of: Status | None) -> None:
        """Take the result of an exchange; of a step with the status of the member that made it."""
        if step_of is None:
            device = self.strategy.runtime.device
            result = torch.load(io.BytesIO(content), map_location=device, weights_only=False)
            self._complete(result, is_step=False)
        else:
            self.state.restore(content)
            self._commit()
            self.strategy.end_window(None)
            self._step_was_copied = step_of.stepped

    def _complete(self, result: Any, *, is_step: bool) -> None:
        self.exchanges += 1
        self.steps += is_step
        self._result, self._was_step = result, is_step

    def change_members(self) -> bool:
        """Let loaders assign samples to the present members; return whether the open window is complete."""
        if self._agreement is None:
            return True
        for loader in self._loaders():
            loader.change_members(self._agreement.members)
        self._agreement = None
        state = self.state.gradient_state
        active = state.active_dataloader
        if active is not None and active.elastic.trains:
            state.sync_gradients &= active.closes_window
        return state.sync_gradients

    def begin_with(self, agreement: Agreement, exchanges: int, steps: int, content: bytes) -> None:
        """As a replacement: take the state of a member, and assign samples to all of them from now on."""
        self.exchanges, self.steps = exchanges, steps
        self.state.restore(content)
        self._agreement = agreement
        self.change_members()

    def _loaders(self) -> list[Any]:
        """Return all loaders, also those that only the script knows."""
        iterated = [loader for loader in self.state.gradient_state.dataloader_references if loader is not None]
        return list({id(loader): loader for loader in [*self.state.loaders, *iterated]}.values())


def stayed(agreement: Agreement) -> dict[int, int]:
    """Return the members that are not about to join, and how many exchanges each has completed."""
    done = {rank: _status(agreement, rank).exchanges for rank in agreement.statuses}
    return {rank: number for rank, number in done.items() if number != JOINING}


def _status(agreement: Agreement, rank: int) -> Status:
    return build(Status, agreement.statuses[rank], f"the status of rank {rank} in the store of the run")
