"""What would save memory, by which setting, and how much.

The trace is changed as the setting would change it, and its peak is computed again. This is an estimate: only sizes and
lives of allocations change. A plan of the script with the setting knows better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..trace import (
    ACTIVATIONS,
    COMMUNICATION,
    COPIES,
    FORWARD,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    OWNERS,
    SETUP,
    TEMPORARIES,
    WEIGHTS,
    Trace,
)
from .depth import along
from .lifetimes import Flags, Lifetimes, block_of, lifetimes_of
from .peak import Memory
from .sweep import peaks_by_place, places_of, sweep

_STATE = (WEIGHTS, GRADIENTS, OPTIMIZER)
_KEPT = (ACTIVATIONS, COPIES)
_WORK = (ACTIVATIONS, TEMPORARIES)
_SHARDED = "dp_shard"
RECOMPUTE = "recompute blocks"
"""The lever that a search looks for."""

Peaks = dict[str, float]
"""Place -> bytes at its largest moment, as in `Memory.places`."""


@dataclass
class MemoryOption:
    """One change that saves memory."""

    name: str
    setting: str
    """How it is set: flags of `meshwright launch`, or what to change in the script."""
    saves: float
    """Bytes of the peak."""
    price: str
    """What it costs."""


@dataclass(frozen=True)
class _Change:
    name: str
    setting: Callable[[Trace], str]
    price: str
    makes: Callable[[Trace, Lifetimes], Lifetimes | None]
    """The lives with the setting; None if it does not apply."""


def lever_peaks(trace: Trace) -> dict[str, Peaks]:
    """Compute the peaks of a trace with each lever."""
    lives = lifetimes_of(trace)
    names, places = places_of(trace)
    found = {}
    for change in _CHANGES:
        changed = change.makes(trace, lives)
        if changed is None:
            continue
        moments = sweep(changed)
        peaks = peaks_by_place(moments, places, names)
        found[change.name] = {place: float(moments.total[at]) for place, at in peaks.items()}
    return found


def extrapolated_peaks(a: Mapping[str, Peaks], b: Mapping[str, Peaks], factor: float) -> dict[str, Peaks]:
    """Return the peaks at a point of the line from `a` (factor 0) to `b` (factor 1), at places that both have."""
    return {
        name: along(
            {place: a[name][place] for place in peaks if place in a[name]},
            {place: size for place, size in peaks.items() if place in a[name]},
            factor,
        )
        for name, peaks in b.items()
        if name in a
    }


def levers_of(trace: Trace, memory: Memory, peaks: Mapping[str, Peaks]) -> list[MemoryOption]:
    """Return the levers that save 1 % or more, the largest first; `peaks` as `lever_peaks` returns them."""
    levers = []
    for change in _CHANGES:
        if change.name in peaks:
            steps = [size for place, size in peaks[change.name].items() if place != SETUP]
            saves = memory.total - max(steps, default=memory.total)
            levers.append(MemoryOption(change.name, change.setting(trace), saves, change.price))
    held = memory.reserved - memory.expandable
    levers.append(
        MemoryOption(
            "growing segments",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            held,
            "saves reserved memory only",
        )
    )
    return sorted((lever for lever in levers if lever.saves >= 0.01 * memory.total), key=lambda lever: -lever.saves)


def _owned(lives: Lifetimes, *owners: str) -> Flags:
    return np.isin(lives.owner, [OWNERS.index(owner) for owner in owners])


def _scaled(lives: Lifetimes, which: Flags, factor: float) -> Lifetimes:
    return replace(lives, size=np.where(which, (lives.size * factor).astype(np.int64), lives.size))


def _longer(lives: Lifetimes) -> Flags:
    """Return what outlives the pass in which it was made."""
    return np.greater(lives.passes.at(lives.freed - 1), lives.passes.at(lives.born))


def _in_blocks(trace: Trace) -> Flags:
    return np.array([block_of(allocation.module) is not None for allocation in trace.allocations])


def _recomputed(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    """Blocks keep their output. The rest is there again when the backward pass begins to free it."""
    made = _owned(lives, *_WORK, COPIES)
    kept = _owned(lives, *_KEPT).tolist()
    number = lives.passes.at(lives.born).tolist()
    groups: dict[tuple[int, str], list[int]] = {}
    for index in np.flatnonzero(made).tolist():
        block = block_of(trace.allocations[index].module)
        if block is not None and trace.allocations[index].phase == FORWARD:
            groups.setdefault((number[index], block), []).append(index)
    born, freed = lives.born.copy(), lives.freed.copy()
    for members in groups.values():
        output = max(members, key=lambda index: int(lives.born[index]))
        inside = [index for index in members if kept[index] and index != output]
        if inside:
            born[inside] = max(int(lives.freed[inside].min()) - 1, int(lives.born[output]))
            freed[output] = max(int(lives.freed[output]), int(lives.freed[inside].max()))
    return replace(lives, born=born, freed=freed) if groups else None


def _outputs(lives: Lifetimes, recomputed: Lifetimes) -> Flags:
    """Return what is still kept for the backward pass when blocks are recomputed."""
    return np.equal(recomputed.born, lives.born) & _owned(lives, *_WORK) & _longer(recomputed)


def _smaller_batches(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    step = trace.steps[-1] if trace.steps else None
    if step is None or step.samples // max(1, step.passes) < 2:
        return None
    return _scaled(lives, _owned(lives, *_WORK), 0.5)


def _sharded(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    """Without shards: all state over all ranks with a replica. With some: over twice as many, if there are replicas."""
    replicas = trace.axes.get("dp_replicate", 1)
    if replicas < 2:
        return None
    if _SHARDED in trace.axes:
        return _scaled(lives, _owned(lives, *_STATE), 1 / replicas)
    without_buckets = _scaled(lives, _owned(lives, COMMUNICATION), 0.0)
    sharded = _scaled(without_buckets, _owned(lives, GRADIENTS, OPTIMIZER), 1 / replicas)
    weights = _owned(lives, WEIGHTS)
    two_blocks = 2 * _largest_block(trace, lives, weights)
    return _scaled(sharded, weights, min(1.0, 1 / replicas + two_blocks / max(1, int(lives.size[weights].sum()))))


def _largest_block(trace: Trace, lives: Lifetimes, weights: Flags) -> int:
    sums: Counter[str] = Counter()
    for index in np.flatnonzero(weights & _in_blocks(trace)).tolist():
        sums[block_of(trace.allocations[index].module) or ""] += int(lives.size[index])
    return max(sums.values(), default=0)


def _offloaded(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    return _scaled(lives, _owned(lives, *_STATE), 0.0) if _SHARDED in trace.axes else None


def _activations_offloaded(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    recomputed = _recomputed(trace, lives)
    if recomputed is None:
        return None
    return _scaled(recomputed, _in_blocks(trace) & _outputs(lives, recomputed), 0.0)


def _split_layers(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    """Blocks are halved, except their outputs, which every process has whole."""
    recomputed = _recomputed(trace, lives)
    if recomputed is None or _halved_axis(trace) is None:
        return None
    work = _in_blocks(trace) & _owned(lives, *_WORK, COPIES) & ~_outputs(lives, recomputed)
    return _scaled(lives, work | _owned(lives, GATHERED, *_state_of_replicas(trace)), 0.5)


def _split_sequences(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    applies = trace.steps and trace.steps[-1].tokens and _halved_axis(trace) is not None
    return _scaled(lives, _owned(lives, *_WORK), 0.5) if applies else None


def _split_stages(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    """Half of the blocks' state; twice as many micro-batches are under way, with half of the activations each."""
    state = _in_blocks(trace) & _owned(lives, *_state_of_replicas(trace))
    return _scaled(lives, state, 0.5) if state.any() else None


def _halved_axis(trace: Trace) -> str | None:
    """Return the data axis that gives processes to another axis, so that the devices stay as many."""
    return next((axis for axis in ("dp_replicate", _SHARDED) if trace.axes.get(axis, 1) % 2 == 0), None)


def _state_of_replicas(trace: Trace) -> tuple[str, ...]:
    """Return the owners that become smaller: state that is sharded already is shared by as many as before."""
    return _STATE if _halved_axis(trace) == "dp_replicate" else ()


def _bfloat16(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    flops = {True: 0, False: 0}
    for operation in trace.operations:
        flops[operation.dtype == "float32"] += operation.flops
    if flops[True] <= flops[False]:
        return None
    return _scaled(lives, _owned(lives, *_WORK, GATHERED), 0.5)


def _one_set_of_gradients(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    """DDP's buckets become the gradients."""
    replicated = trace.axes.get("dp_replicate", 1) > 1 and _SHARDED not in trace.axes
    buckets = _owned(lives, COMMUNICATION)
    return _scaled(lives, buckets, 0.0) if replicated and buckets.any() else None


def _freed_after_forward(trace: Trace, lives: Lifetimes) -> Lifetimes | None:
    """Gathered parameters that outlive their forward pass end with it."""
    if _SHARDED not in trace.axes:
        return None
    long = _owned(lives, GATHERED) & _longer(lives) & _in_blocks(trace)
    return _scaled(lives, long, 0.0) if long.any() else None


def _more(axis: str) -> Callable[[Trace], str]:
    def setting(trace: Trace) -> str:
        halved = _halved_axis(trace) or _SHARDED
        sizes = {axis: 2 * trace.axes.get(axis, 1), halved: trace.axes.get(halved, 1) // 2}
        flags = [f"--parallelism_config_{name}_size {size}" for name, size in sizes.items()]
        return " ".join(("--use_parallelism_config", *flags))

    return setting


def _shards(trace: Trace) -> str:
    if _SHARDED not in trace.axes:
        return "--use_fsdp --fsdp_version 2"
    ranks = trace.axes[_SHARDED] * trace.axes.get("dp_replicate", 1)
    return f"--parallelism_config_dp_shard_size {ranks} --parallelism_config_dp_replicate_size 1"


def _fsdp(flag: str) -> Callable[[Trace], str]:
    def setting(trace: Trace) -> str:
        return flag if _SHARDED in trace.axes else f"--use_fsdp --fsdp_version 2 {flag}"

    return setting


def _halved_batch(trace: Trace) -> str:
    passes = trace.steps[-1].passes if trace.steps else 1
    return f"half the batch size in the script, --gradient_accumulation_steps {2 * passes}"


_CHECKPOINTING = "--fsdp_activation_checkpointing true"
_OFFLOADING = f"{_CHECKPOINTING} --fsdp_activation_checkpointing_offload true"
_BUCKETS = "DistributedDataParallelKwargs(gradient_as_bucket_view=True)"
_CHANGES = (
    _Change(RECOMPUTE, _fsdp(_CHECKPOINTING), "a third more computation", _recomputed),
    _Change(
        "recompute blocks, inputs on the host",
        _fsdp(_OFFLOADING),
        "a third more computation, copies to the host",
        _activations_offloaded,
    ),
    _Change("half the micro-batch", _halved_batch, "smaller products, more launches", _smaller_batches),
    _Change("shard over more processes", _shards, "parameters are gathered over more processes", _sharded),
    _Change("state on the host", lambda _: "--fsdp_offload_params true", "the optimizer steps on the CPU", _offloaded),
    _Change(
        "free parameters after forward",
        lambda _: "--fsdp_reshard_after_forward true",
        "they are gathered twice",
        _freed_after_forward,
    ),
    _Change("split layers in two", _more("tp"), "all-reduces in every block; needs a tp_plan", _split_layers),
    _Change("split sequences in two", _more("cp"), "keys and values are exchanged", _split_sequences),
    _Change("two stages for one", _more("pp"), "stages wait at the ends of a step", _split_stages),
    _Change("16-bit computation", lambda _: "--mixed_precision bf16", "precision", _bfloat16),
    _Change("gradients in the buckets", lambda _: _BUCKETS, "gradients cannot be detached", _one_set_of_gradients),
)
