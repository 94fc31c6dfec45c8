"""Whose rules the collectives of the device obey: NCCL's, or those of the backends of other vendors."""

from __future__ import annotations

import os

from .build import extension

RULES_VARIABLE = "SIMULATED_ACCELERATOR_RULES"
"""The vendor of a process whose program sets none: nccl, xccl or hccl."""


def use_rules(
    vendor: str = "nccl", *, failures_are_told: bool = False, destroy_waits: bool = True, bytes_of_first_use: int = 0
) -> None:
    """Let process groups that are opened from now on obey a vendor's rules; "" for those of the host's backend.

    Args:
        vendor: "nccl", "xccl" (XPU) or "hccl" (Ascend).
        failures_are_told: Whether the network reports a lost peer. Else its collectives never end, as on one machine.
        destroy_waits: Whether destroying a group waits for what is pending; the sources disagree.
        bytes_of_first_use: What a communicator takes of the device's memory for each kind of collective.
    """
    os.environ[RULES_VARIABLE] = vendor
    extension().set_rules(vendor, failures_are_told, destroy_waits, bytes_of_first_use)


def vendor() -> str:
    """Return whose rules new process groups obey."""
    return os.environ.get(RULES_VARIABLE, "")
