"""Context parallelism: sequences are sharded over one mesh axis; torch's ring attention connects the shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ....errors import UnsupportedSettingError


def require_no_recurrence(model: nn.Module, setting: str) -> None:
    """Refuse recurrent layers where sequences are sharded."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            raise UnsupportedSettingError(
                f"{setting} with {name or 'a model'}, a {type(module).__name__},",
                "a recurrent layer needs all positions before its own, and every process has some of them.",
                "Spread the model by dp_shard_size or pp_size.",
            )


@contextmanager
def split_sequences(
    mesh: DeviceMesh,
    strategy: str,
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    no_restore: set[Tensor] | None,
) -> Iterator[None]:
    """Shard the buffers in place along their sequence dimensions; restore them on exit.

    With a causal mask the first positions need less work, so every process gets one chunk from the front and one from
    the back. Positions and labels must be sharded with the inputs; they cannot be computed from the rank.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    if len(buffers) != len(dims):
        raise ValueError(
            f"maybe_context_parallel was given {len(buffers)} buffers and {len(dims)} buffer_seq_dims: each buffer "
            "needs the number of its sequence dimension."
        )
    pieces = 2 * mesh.size()
    for buffer, dim in zip(buffers, dims, strict=True):
        length = buffer.shape[dim]
        if length % pieces:
            raise ValueError(
                f"cp_size={mesh.size()} cuts sequences into {pieces} equal pieces; a buffer of {tuple(buffer.shape)} "
                f"has {length} positions in dimension {dim}. Pad it to {length - length % pieces + pieces} positions."
            )
    set_rotate_method(strategy)
    with context_parallel(
        mesh, buffers=list(buffers), buffer_seq_dims=list(dims), no_restore_buffers=set(no_restore or ())
    ):
        yield
