"""torch's ring attention, for plain causal attention on sequences that are divided as torch divides them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def has_ring(device: torch.device) -> bool:
    """Return whether torch has ring attention for a device; on a CPU only where handlers have been registered."""
    if device.type != "cpu":
        return device.type == "cuda"
    try:
        ring = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    except ImportError:  # an older torch
        return False
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in getattr(ring, "custom_ops", ())


@contextmanager
def ring_attention(
    mesh: DeviceMesh, rotation: str, length: int, device: torch.device
) -> Iterator[Callable[..., Tensor]]:
    """Yield torch's attention over sequences of a length, which every process has a front and a back chunk of."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    # torch takes the length from a buffer that it divides; we divide the real ones.
    sequence = torch.empty(length, dtype=torch.bool, device=device)
    with context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[0], no_restore_buffers={sequence}):
        yield F.scaled_dot_product_attention
