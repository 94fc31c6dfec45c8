"""Record strategies as they run on devices.

Of FSDP2: what is gathered, on which stream, and when computation waits for it. Of pipelines: a stage runs its own
blocks only. Of split sequences: no check of positions, which needs numbers. Of offloaded blocks: what is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_params
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_groups
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from ....config.plugins.offload import OffloadConfig
from ....parallel.mesh.context import documents, sequences, sharding
from ....parallel.mesh.context.positions import PositionCheck
from ....parallel.pipeline import schedules, stages, tracing
from ....parallel.replicas.offload import blocks, gradients
from ....parallel.replicas.offload.buffers import Buffers
from ....parallel.replicas.offload.strategy import StreamedBlocks
from ....parallel.replicas.offload.streaming import BlockStream
from ....runtime.streams import mapping, read_ahead
from ..trace import COMMUNICATION, GATHERED, SETUP, Allocation, Collective, Trace
from .host.values import Values
from .recorder import OFFLOADED, TraceRecorder
from .replacing import replaced
from .replicas import REDUCE_STREAM

GATHER_STREAM = "gather"


def watch_strategies(recorder: TraceRecorder, values: Values) -> None:
    """Label memory and collectives, and keep out of the record what does not happen on a device."""
    _keep_positions_real()
    _mute_sharding_propagation(recorder)
    _label(recorder, param_groups, "foreach_all_gather", stream=GATHER_STREAM, owner=COMMUNICATION)
    _label(recorder, param_groups, "foreach_reduce", stream=REDUCE_STREAM, owner=COMMUNICATION)
    _label(recorder, FSDPParam, "init_all_gather_outputs", owner=GATHERED)
    _label(recorder, FSDPParam, "alloc_all_gather_outputs", owner=GATHERED)
    _label(recorder, FSDPParam, "init_unsharded_param", owner=GATHERED)
    replaced(fsdp_params, "_chunk_with_empty")
    fsdp_params._chunk_with_empty = _Chunks  # type: ignore[attr-defined, assignment]
    _note_waits(recorder)
    _watch_stages(recorder, values)
    PositionCheck.check = lambda self, model, args, kwargs: None  # type: ignore[method-assign]


def offload_to_host(recorder: TraceRecorder) -> None:
    """Let offloaded activations leave the device: here they are on a CPU already, and nothing would be copied."""

    class SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            super().__init__(self._pack, torch.clone)

        def _pack(self, tensor: Tensor) -> Tensor:
            with recorder.labelled(owner=OFFLOADED):
                return tensor.clone()

    torch.autograd.graph.save_on_cpu = SaveOnHost  # type: ignore[misc,assignment]


def stream_blocks(recorder: TraceRecorder, on_accelerators: bool) -> None:
    """Let offloaded blocks be on the host, and what threads do for them happen at once.

    A disk is as the host: the device has the same.
    """
    host = OFFLOADED if on_accelerators else None

    class AtOnce:
        """Do work when it is submitted: a thread would not have the modes that record."""

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            with recorder.labelled(owner=host):
                future.set_result(work(*args))
            return future

        def shutdown(self, wait: bool = True) -> None: ...

    plain_init = StreamedBlocks.__init__

    def init(self: Any, runtime: Any, config: OffloadConfig, *args: Any) -> None:
        plain_init(self, runtime, replace(config, placement="host"), *args)

    StreamedBlocks.__init__ = init  # type: ignore[method-assign, assignment]
    for place in (gradients, read_ahead):
        place.ThreadPoolExecutor = AtOnce  # type: ignore[attr-defined]
    mapping.is_mapped = lambda tensor: False
    blocks._check = lambda param, name: None  # fake parameters are of a class of their own
    if host is not None:
        _label(recorder, Buffers, "transfer", owner=host)
    _label(recorder, BlockStream, "__init__", owner=GATHERED)


def buffers_of_others(trace: Trace, others: float) -> list[Allocation]:
    """Return the buffers to receive that torch makes for micro-batches that were not traced.

    Nothing else is kept for each of them: 1F1B has as many in flight as were traced, and a schedule that returns no
    outputs frees them.
    """
    return [
        replace(allocation, size=round(others * allocation.size))
        for allocation in trace.allocations
        if allocation.owner == COMMUNICATION and allocation.phase == SETUP and allocation.freed is None
    ]


class _Chunks(Sequence[Tensor]):
    """The shards of a parameter, made when one is taken: FSDP takes one of as many as there are ranks."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim
        self._rows = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Return a shard; those behind the last row are empty."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        begin = index * self._rows
        rows = min(self._rows, self._tensor.size(self._dim) - begin)
        return self._tensor.narrow(self._dim, begin, rows) if rows > 0 else self._tensor.new_empty(0)


def _label(recorder: TraceRecorder, place: Any, name: str, **labels: str) -> None:
    plain = replaced(place, name)
    if plain is None:
        return

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with recorder.labelled(**labels):
            return plain(*args, **kwargs)

    setattr(place, name, labelled)


def _note_waits(recorder: TraceRecorder) -> None:
    """Note where computation waits for the gather of a group."""
    group_class = param_groups.FSDPParamGroup
    plain_unshard, plain_wait = replaced(group_class, "unshard"), replaced(group_class, "wait_for_unshard")
    issued: dict[int, list[Collective]] = {}

    def unshard(self: Any, *args: Any, **kwargs: Any) -> None:
        count = len(recorder.trace.collectives)
        plain_unshard(self, *args, **kwargs)
        issued.setdefault(id(self), []).extend(recorder.trace.collectives[count:])

    def wait_for_unshard(self: Any) -> None:
        recorder.wait(issued.pop(id(self), []))
        plain_wait(self)

    group_class.unshard, group_class.wait_for_unshard = unshard, wait_for_unshard  # type: ignore[method-assign]


def _watch_stages(recorder: TraceRecorder, values: Values) -> None:
    """Record nothing of a stage before its first block: other stages have computed it."""
    plain_run, plain_receive = stages.StageView._run, stages.StageView._receive
    plain_train = schedules.Pipeline._run
    calls: dict[tuple[Any, Any], int] = {}

    def run(self: Any, *args: Any) -> Any:
        if self.index == 0:
            return plain_run(self, *args)
        self._before_first_block = ExitStack()
        with self._before_first_block:
            self._before_first_block.enter_context(recorder.muted())
            return plain_run(self, *args)

    def receive(self: Any, *args: Any) -> Any:
        if self._received is not None:
            self._before_first_block.close()
        return plain_receive(self, *args)

    def numbered(plain: Callable[..., Any]) -> Callable[..., Any]:
        def one_more(self: Any, *args: Any, **kwargs: Any) -> Any:
            number = calls[self, plain] = calls.get((self, plain), -1) + 1
            with values.standing_for(number):  # micro-batches come in the order of their numbers
                return plain(self, *args, **kwargs)

        return one_more

    def train(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.clear()
        plain_train(self, *args, **kwargs)

    stages.StageView._run, stages.StageView._receive = run, receive  # type: ignore[method-assign, assignment]
    for place, name in ((schedules._Stage, "forward_maybe_with_nosync"), (schedules._ScheduledStages, "_finish")):
        setattr(place, name, numbered(getattr(place, name)))
    schedules.Pipeline._run = train  # type: ignore[method-assign]
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):  # buffers for every micro-batch
        _label(recorder, PipelineStage, name, owner=COMMUNICATION)
    _mute(recorder, tracing.MetaModel, "trace")
    tracing._StageTracer._generator_state = lambda self: b""  # type: ignore[method-assign]


def _mute_sharding_propagation(recorder: TraceRecorder) -> None:
    """DTensor runs every operator once on the global shape, to learn the shape of the result. No device does this."""
    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        _mute(recorder, ShardingPropagator, name)


def _mute(recorder: TraceRecorder, place: Any, name: str) -> None:
    plain = replaced(place, name)
    if plain is None:
        return

    def muted(*args: Any, **kwargs: Any) -> Any:
        with recorder.muted():
            return plain(*args, **kwargs)

    setattr(place, name, muted)


def _keep_positions_real() -> None:
    """Let ranks of meshes and positions of sequences be real tensors: they are read as numbers."""
    for name in ("__init__", "_concatenate", "_flatten", "__getitem__", "get_coordinate", "_get_all_submeshes",
                 "_init_process_groups", "_unflatten"):  # fmt: skip
        _keep_real(DeviceMesh, name)
    for place in (device_mesh, torch.distributed):
        _keep_real(place, "init_device_mesh")
    for place in (sharding, sequences):
        for name in ("contiguous", "head_tail"):
            _keep_real(place, name)
        replaced(place, "positions_among")
        setattr(place, "positions_among", lambda buffers, dims: None)  # noqa: B010 - it is not exported
    for name in ("inverse", "is_in_order"):
        getter = cached_property(_real(vars(sharding.Sharding)[name].func))
        getter.__set_name__(sharding.Sharding, name)
        setattr(sharding.Sharding, name, getter)
    _keep_real(documents.Documents, "_new_plan")


def _keep_real(place: Any, name: str) -> None:
    plain = replaced(place, name)
    if isinstance(plain, (staticmethod, classmethod)):
        setattr(place, name, type(plain)(_real(plain.__func__)))
    elif plain is not None:
        setattr(place, name, _real(plain))


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return real
