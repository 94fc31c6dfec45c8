"""torch's ring attention on a CPU: its flash kernel there has no handler, so two are registered, for tests only."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register() -> None:
    """Let `context_parallel` work on CPUs."""
    ring.custom_ops[_forward] = _ring_forward
    ring.custom_ops[_backward] = _ring_backward


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread(tensors: Any, like: DTensor) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(t, like.device_mesh, like.placements, run_check=False) for t in tensors)


def _ring_forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    given = dict(zip(("query", "key", "value", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    query = given["query"]

    def attend(query: Any, key: Any, value: Any, is_causal: bool, **options: Any) -> tuple[Any, ...]:
        results = _forward(query, key, value, 0.0, is_causal, scale=options.get("scale"))
        return tuple(result.contiguous() for result in results)  # the kernel's log-sum has strides of its own

    results = ring._templated_ring_attention(
        query.device_mesh.get_group(),
        2,
        attend,
        query=_local(query),
        key=_local(given["key"]),
        value=_local(given["value"]),
        is_causal=given.get("is_causal", False),
        scale=given.get("scale"),
    )
    return _spread(results, query)


def _ring_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    grad_out, query, key, value, out, logsumexp, _, is_causal = args

    def attend(
        grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, scale: Any = None
    ) -> Any:
        return _backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale)

    results = ring._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        2,
        attend,
        grad_out=_local(grad_out),
        grad_out_name="grad_out",
        query=_local(query),
        key=_local(key),
        value=_local(value),
        out=_local(out),
        logsumexp=_local(logsumexp),
        is_causal=is_causal,
        scale=kwargs.get("scale"),
    )
    return _spread(results[:3], query)
