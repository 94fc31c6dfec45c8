"""Small numbers that tell large tensors apart, at a cost that does not depend on their size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.modules.dtensors import local
from ...runtime.collectives.nested import leaves

MOST_TENSORS = 128
_ELEMENTS = 1 << 19
"""Elements that are read of all tensors together."""
_ELEMENTS_OF_INPUT = 1 << 16
_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


def evenly(items: Sequence[Any]) -> list[Any]:
    """Return at most `MOST_TENSORS` of the items, spread over all of them."""
    step = -(-len(items) // MOST_TENSORS) or 1
    return list(items[::step])


def norms(tensors: Sequence[Tensor | None]) -> list[float | None]:
    """Return the L1 norm of the beginning of each tensor; None for those without values of this kind.

    Of a tensor that is spread, this rank's part counts. The device is waited for once.
    """
    most = max(16, _ELEMENTS // max(1, len(tensors)))
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            if tensor is None or not tensor.is_floating_point() or not _is_there(tensor):
                continue
            part = _beginning(local(tensor.detach()), most)
            found[number] = torch.linalg.vector_norm(part, 1, dtype=torch.float32)
        if not found:
            return [None] * len(tensors)
        device = next(iter(found.values())).device
        values = torch.stack([norm.to(device) for norm in found.values()]).tolist()
    numbers = dict(zip(found, values, strict=True))
    return [numbers.get(number) for number in range(len(tensors))]


def fingerprint(inputs: Any) -> int | None:
    """Return a number for the inputs of a model; None if they hold no tensor, or objects that are not data."""
    seen, has_tensor = 0, False
    for leaf in leaves(inputs):
        if isinstance(leaf, Tensor):
            if leaf.is_quantized or not _is_there(leaf):
                return None
            has_tensor = has_tensor or leaf.numel() > 0
            seen = zlib.crc32(_bytes_of(leaf), seen)
        elif isinstance(leaf, _PLAIN):
            seen = zlib.crc32(repr(leaf).encode(), seen)
        else:
            return None
    return seen if has_tensor else None


def _is_there(tensor: Tensor) -> bool:
    """Return whether a tensor can be read: the storage of one that is offloaded may be empty, and a read crashes."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    own = local(tensor.detach())
    with torch._C.DisableTorchFunctionSubclass():  # gradients of offloaded blocks take note of who gets their storage
        return own.numel() == 0 or own.untyped_storage().nbytes() > 0


def _beginning(tensor: Tensor, most: int) -> Tensor:
    """Return a view of at most about so many elements, without a copy, whatever the strides."""
    for dim in range(tensor.dim()):
        if tensor.numel() <= most:
            break
        tensor = tensor.narrow(dim, 0, max(1, most * tensor.size(dim) // tensor.numel()))
    return tensor


def _bytes_of(tensor: Tensor) -> bytes:
    """Return elements from all over a tensor."""
    own = local(tensor.detach())
    if own.is_contiguous():
        flat = own.reshape(-1)
        some = flat[:: max(1, flat.numel() // _ELEMENTS_OF_INPUT)]
    else:
        some = _beginning(own, _ELEMENTS_OF_INPUT)
    some = torch.view_as_real(some) if some.is_complex() else some
    return repr(tuple(tensor.shape)).encode() + some.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
