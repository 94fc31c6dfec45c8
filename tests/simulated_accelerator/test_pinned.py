"""Pinned memory is taken as it is counted, and given back."""

from __future__ import annotations

from typing import Any

import torch

from meshwright import Accelerator
from meshwright.checkpoint.commit.staging import Staging
from meshwright.config.plugins.offload import OffloadConfig
from tests.parallel.replicas.offload.training import train
from tests.simulated_accelerator import run_on_a_simulated_accelerator
from tests.simulated_accelerator.build import extension


class Pinned:
    """What was asked for and taken from the system, since this began."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        asked, taken, *_ = extension().pinned_statistics()
        return asked, taken

    @property
    def asked(self) -> int:
        return self._now()[0] - self._before[0]

    @property
    def taken(self) -> int:
        return self._now()[1] - self._before[1]


def save_in_the_background() -> None:
    state = {
        name: torch.ones(size, device="gpu") for name, size in (("a", 700_000), ("b", 1_100_000), ("c", 2_500_000))
    }
    pinned, staging = Pinned(), Staging()
    staging.copy("model", state)
    staging.synchronize()
    assert pinned.taken <= 1.05 * staging.num_bytes
    staging.clear()
    assert pinned.taken == 0


def run_that_offloads() -> None:
    pinned, most = Pinned(), [(0, 0)]

    def look(step: int, accelerator: Accelerator) -> None:
        most.append((pinned.taken, pinned.asked))
        held.append(accelerator)

    held: list[Any] = []
    train(steps=2, num_blocks=3, width=400, optimizer="SGD", on_step=look, offload=OffloadConfig())
    taken, asked = max(most)
    assert 0 < taken <= 1.05 * asked
    accelerator = held.pop()
    held.clear()
    accelerator.free_memory()
    assert pinned.taken <= 0.05 * taken


def test_a_save_in_the_background_takes_what_it_counts_and_gives_it_back_on_a_simulated_accelerator() -> None:
    run_on_a_simulated_accelerator(save_in_the_background, in_new_processes=True)  # nobody else's memory is there


def test_a_run_that_offloads_takes_what_it_asks_for_and_gives_it_back_on_a_simulated_accelerator() -> None:
    run_on_a_simulated_accelerator(run_that_offloads, in_new_processes=True)
