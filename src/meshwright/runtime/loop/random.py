"""Seed random generators, and synchronize them across processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ...config.enums import RNGType
from ..collectives.operations import broadcast
from ..devices import device as devices
from ..group.runtime import Runtime


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators, those of the accelerators included.

    `device_specific` adds the rank, so that each process draws its own numbers; `deterministic` also asks torch for
    deterministic algorithms.
    """
    if device_specific:
        seed += Runtime.current().process_index
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)
    devices.seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every process the state of one generator of rank 0."""
    runtime = Runtime.current()
    if runtime.num_processes == 1:
        return
    kind = str(rng_type if rng_type is not None else RNGType.TORCH)
    if kind == RNGType.TORCH:
        torch.set_rng_state(_from_rank_zero(torch.get_rng_state(), runtime))
    elif kind == RNGType.GENERATOR:
        if generator is None:
            raise ValueError('synchronize_rng_state("generator") needs the generator to synchronise.')
        generator.set_state(_from_rank_zero(generator.get_state(), runtime))
    elif kind == runtime.device.type:  # also of kinds that RNGType does not list
        state = devices.get_device_rng_state(runtime.device)
        devices.set_device_rng_state(_from_rank_zero(state, runtime), runtime.device)
    else:
        raise ValueError(
            f"Rank {runtime.process_index} was asked to synchronise the {kind!r} generator, but runs on "
            f"{runtime.device}: choose from torch, generator and {runtime.device.type}."
        )


def synchronize_rng_states(rng_types: Sequence[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Give every process the state of several generators of rank 0."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)


def draw_seed() -> int:
    """Draw a seed from torch's generator as a `RandomSampler` does."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def shared_seed() -> int:
    """Draw a seed on every process and return rank 0's."""
    seed = draw_seed()
    runtime = Runtime.current()
    if runtime.num_processes > 1:
        seed = int(_from_rank_zero(torch.tensor(seed), runtime).item())
    return seed


def initial_seed_of_rank_zero() -> int:
    """Return the seed that rank 0's generator was last given, on every process."""
    runtime = Runtime.current()
    seed = torch.random.initial_seed()
    if runtime.num_processes == 1:
        return seed
    as_signed = seed - 2**64 if seed >= 2**63 else seed  # seeds are unsigned, tensors are not
    return int(_from_rank_zero(torch.tensor(as_signed), runtime).item()) % 2**64


def _from_rank_zero(state: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    """Broadcast a small CPU tensor via the device, which every process group supports.

    Any rank would do as the source. If the first one is lost, the next one takes its place.
    """
    give = partial(broadcast, state.to(runtime.device))
    received: torch.Tensor = runtime.run_collective(give, source=0, carries_data=False)
    return received.cpu()
