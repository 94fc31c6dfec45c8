"""Public errors. Each message states what happened, on which rank, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence

REQUEUE_EXIT_CODE = 75
"""The exit code of a run that saved and stopped on request: EX_TEMPFAIL of sysexits.h. Slurm's RequeueExit can name it,
and `meshwright launch` passes it on."""


class UnsupportedSettingError(ValueError):
    """Refuse a setting that this version accepts by name but cannot honour.

    The message names the setting, the reason and what to use instead. Nothing has been started or changed.
    """

    def __init__(self, setting: str, reason: str, remedy: str) -> None:
        self.setting = setting
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{setting} cannot be used: {reason} {remedy}")


class InvalidDataError(ValueError):
    """Refuse a file or a message that is damaged or forged; nothing has been changed.

    It was written by another program or machine, and is not what its format allows. The message names the file or the
    sender, and what is wrong.
    """


class UnsafeFileError(InvalidDataError):
    """Refuse a file whose loading would execute code.

    The file holds pickled objects beyond tensors and plain data. Load it only if you trust who wrote it: the message
    says how.
    """

    def __init__(self, message: str, culprit: str = "") -> None:
        self.culprit = culprit or message
        super().__init__(message)


class RuntimeConflictError(RuntimeError, ValueError):
    """Refuse a setting that the process has already settled differently; published as a `ValueError`.

    A process has one device and one process group. Ask for them in the first `Accelerator` or `PartialState`, or call
    `PartialState._reset_state()` between two. No launcher can be called in a process that a launcher has started.
    """


class DistributedOperationException(RuntimeError):
    """Report ranks that entered one collective with different data.

    It is raised in debug mode (`meshwright launch --debug`) before the backend is called. `per_rank[r]` describes what
    rank `r` brought. Make the shapes equal with `pad_across_processes`, or gather ragged data with `gather_object`.
    """

    def __init__(self, message: str, per_rank: Sequence[object] = ()) -> None:
        self.per_rank = list(per_rank)
        super().__init__(message)


class StuckError(RuntimeError):
    """Report ranks that wait for each other in vain: who is where, and which rule was broken.

    The watcher raises it on every rank. Go to the line that the first sentence names: usually a call that every rank
    must make stands inside a condition on the rank, or one rank has left the loop earlier.
    """


class FirstStepsWarning(UserWarning):
    """Tell a mistake that the first two steps of a run show, at its line.

    Training goes on. `MESHWRIGHT_FIRST_STEPS=raise` makes an error of it, and `off` leaves the check out.
    """


class FirstStepsError(RuntimeError):
    """Report a mistake that the first two steps of a run show, with `MESHWRIGHT_FIRST_STEPS=raise`.

    The rank that sees it raises it. The message begins with the line, and ends with what to do.
    """


class ReplicaMismatchError(RuntimeError):
    """Report replicas whose parameters are not bitwise equal.

    `check_replicas` raises it on every rank and names the one that differs from most. A device has computed wrongly, or
    the script changes parameters on some ranks only. Go on from a checkpoint of before, without that host.
    """


class ReplicaLostError(RuntimeError):
    """Report that a replica was lost, and with it values that no other one has.

    It is raised under `meshwright launch --survive` where going on would give a wrong metric: an evaluation summed up
    on each rank, or gathered in several calls per batch. Gather the results of a batch by one call of
    `gather_for_metrics`; the samples of the lost replica are then evaluated by the others.
    """


class LaunchError(RuntimeError):
    """Report a launch that cannot begin, before anything was started.

    The machines cannot reach each other, or the settings contradict each other. `meshwright launch --explain` prints
    every setting with its origin, and the plan.
    """
