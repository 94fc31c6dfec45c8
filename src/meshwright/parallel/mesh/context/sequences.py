"""The axis over which sequences are divided: context parallelism (`cp`) or Ulysses (`sp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ....errors import UnsupportedSettingError
from .attention import ShardedAttention
from .positions import PositionCheck, SplitBuffers
from .ring import has_ring, ring_attention
from .sharding import Sharding, balanced, contiguous, head_tail, positions_among
from .transformers_models import ShardedCalls, configs_of, require_attention_interface, sharded_calls


def require_no_recurrence(model: nn.Module, setting: str) -> None:
    """Refuse recurrent layers where sequences are sharded."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            raise UnsupportedSettingError(
                f"{setting} with {name or 'a model'}, a {type(module).__name__},",
                "a recurrent layer needs all positions before its own, and every process has some of them.",
                "Spread the model by dp_shard_size or pp_size.",
            )


class SequenceAxis:
    """The processes that share sequences, and what is divided over them at the moment."""

    def __init__(self, mesh: DeviceMesh, *, rotation: str | None, in_stages: bool, check_group: Any) -> None:
        """Take the axis of the mesh.

        Args:
            mesh: The axis.
            rotation: How torch's ring passes keys on: context parallelism. None stands for Ulysses.
            in_stages: Whether models are cut into stages, whose layers see some sequences of a batch at a time.
            check_group: The processes that raise the error of one of them.
        """
        self.mesh = mesh
        self.size = mesh.size()
        self.group = mesh.get_group()
        self.by_heads = rotation is None
        self.name = "sp_size" if self.by_heads else "cp_size"
        self.setting = f"{'Sequence' if self.by_heads else 'Context'} parallelism ({self.name} > 1)"
        self._rotation = rotation or ""
        self._in_stages = in_stages
        self._check_group = check_group
        self._configs: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        self.buffers: SplitBuffers | None = None
        """What is divided at the moment, with the dimension of its positions."""
        self.attention: ShardedAttention | None = None
        self._calls: ShardedCalls | None = None
        self._keeps_apart: dict[int, bool] = {}
        self._batch = ExitStack()
        """The current batch of a loader that divides batches."""
        self._is_dividing_batches = False

    # --- models -------------------------------------------------------------------------------------------------------

    def require(self, model: nn.Module) -> None:
        """Refuse a model that is known not to work, before it is changed."""
        require_no_recurrence(model, f"{self.name}={self.size}")
        require_attention_interface(model, self.setting)

    def watch(self, model: nn.Module) -> PositionCheck:
        """Read the documents of every call of a model, and check it before the first."""
        self._configs[model] = [] if self._in_stages else configs_of(model)
        if self._configs[model]:
            begin: Callable[..., Any] = torch.compiler.disable(self._begin_call)  # type: ignore[no-untyped-call]
            model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            model.register_forward_hook(lambda *_: self._end_call(), always_call=True)
        return PositionCheck(model, self.setting, lambda: (self.buffers, self.attention), self._check_group)

    def _begin_call(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return None if self._calls is None else (args, self._calls.begin(model, args, kwargs))

    def _end_call(self) -> None:
        if self._calls is not None:
            self._calls.end()

    # --- dividing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def dividing(
        self, buffers: Sequence[Tensor], dims: Sequence[int], no_restore: set[Tensor] | None
    ) -> Iterator[None]:
        """Divide buffers in place along their sequence dimensions; restore them on exit."""
        if self._is_dividing_batches or not buffers:  # a loader has divided them
            yield
            return
        dims = self._checked_dims(buffers, dims)
        sharding = self._sharding_of(buffers, dims)
        parts = [sharding.part_of(buffer.detach(), dim) for buffer, dim in zip(buffers, dims, strict=True)]
        kept = [None if any(buffer is other for other in no_restore or ()) else buffer.detach() for buffer in buffers]
        with torch.no_grad():  # a new storage: a buffer may be a view of another
            for buffer, part in zip(buffers, parts, strict=True):
                cast(Any, buffer).set_(part)
        try:
            with self._active(sharding, list(zip(buffers, dims, strict=True))):
                yield
        finally:
            with torch.no_grad():
                for buffer, whole in zip(buffers, kept, strict=True):
                    if whole is not None:
                        cast(Any, buffer).set_(whole)

    def _checked_dims(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> list[int]:
        if len(buffers) != len(dims):
            raise ValueError(
                f"maybe_context_parallel was given {len(buffers)} buffers and {len(dims)} buffer_seq_dims: each buffer "
                "needs the number of its sequence dimension."
            )
        dims = [dim % buffer.dim() for buffer, dim in zip(buffers, dims, strict=True)]
        lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"maybe_context_parallel was given buffers with {', '.join(map(str, lengths))} positions in their "
                "sequence dimensions: all belong to the same sequences and need the same length."
            )
        pieces = 2 * self.size
        if lengths[0] < pieces or (self._in_stages and lengths[0] % pieces):
            raise ValueError(
                f"{self.name}={self.size} cuts sequences into {pieces} pieces"
                f"{' of equal length, because models are cut into stages,' if self._in_stages else ''}; a buffer of "
                f"{tuple(buffers[0].shape)} has {lengths[0]} positions in dimension {dims[0]}. Pad it to "
                f"{-(-lengths[0] // pieces) * pieces} positions."
            )
        return dims

    def _sharding_of(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Sharding:
        """Choose which positions each process gets."""
        length, rank = buffers[0].shape[dims[0]], dist.get_rank(self.group)
        if self.by_heads:
            return contiguous(length, self.size, rank)
        positions = None if self._in_stages else positions_among(buffers, dims)
        if positions is None and length % (2 * self.size) == 0:
            return head_tail(length, self.size, rank)
        return balanced(torch.arange(length)[None] if positions is None else positions, self.size, rank)

    @contextmanager
    def _active(self, sharding: Sharding, buffers: SplitBuffers) -> Iterator[None]:
        """Join the parts of sequences in attention inside the context."""
        before = (self.buffers, self.attention, self._calls)
        device, configs = buffers[0][0].device, [config for known in self._configs.values() for config in known]
        with ExitStack() as stack:
            ring = None
            if sharding.is_head_tail and has_ring(device):
                ring = stack.enter_context(ring_attention(self.mesh, self._rotation, sharding.length, device))
            attention = ShardedAttention(sharding, self.group, self.setting, by_heads=self.by_heads, ring=ring)
            calls = stack.enter_context(sharded_calls(attention, configs, self._keeps_apart))
            stack.enter_context(_sdpa_replaced(attention))
            self.buffers, self.attention, self._calls = buffers, attention, calls
            try:
                yield
            finally:
                self.buffers, self.attention, self._calls = before

    # --- batches of a loader ------------------------------------------------------------------------------------------

    def begin_batch(self, batch: Any) -> Any:
        """Divide a batch that a loader returns; it stays divided until the next one, or the end."""
        self.end_batch()
        sequences = _sequences_in(batch)
        if sequences is None:
            return batch
        divided, length = sequences
        sharding = self._sharding_of([divided["input_ids"]], [1])
        self._checked_dims([divided["input_ids"]], [1])
        parts = {
            name: sharding.part_of(value, 1)
            for name, value in divided.items()
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
        }
        self._batch.enter_context(self._active(sharding, [(part, 1) for part in parts.values()]))
        self._is_dividing_batches = True
        return type(batch)({**divided, **parts})

    def end_batch(self) -> None:
        """Forget the current batch of a loader."""
        self._is_dividing_batches = False
        self._batch.close()


def _sequences_in(batch: Any) -> tuple[dict[str, Any], int] | None:
    """Return the fields of a batch with labels shifted by one position, and the length of its sequences."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        return None
    fields = dict(batch)
    labels = fields.pop("labels", None)
    if isinstance(labels, Tensor) and "shift_labels" not in fields:
        fields["shift_labels"] = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return fields, fields["input_ids"].shape[1]


@contextmanager
def _sdpa_replaced(attention: ShardedAttention) -> Iterator[None]:
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = torch.compiler.disable(attention.sdpa)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
