"""Choose the kernels that an accelerator would run, while tensors are fake and on a CPU.

Attention, autocast and optimizers take other code paths on a GPU than on a CPU, and these need other amounts of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _foreach_utils

_LARGEST_FLASH_HEAD = 256
_IN_FP32 = {
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.nll_loss, F.cross_entropy, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.kl_div, F.cosine_similarity, F.softplus, torch.softmax, torch.log_softmax,
    torch.layer_norm, torch.group_norm, torch.exp, torch.log, torch.pow, torch.rsqrt, torch.reciprocal, torch.sum,
    torch.prod, torch.cumsum, torch.norm, torch.sinh, torch.cosh, torch.tan, torch.acos, torch.asin, torch.erfinv,
    Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__, Tensor.rsqrt,
    Tensor.reciprocal, Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.norm,
}  # fmt: skip
"""What autocast computes in fp32 on a GPU, and on a CPU in the dtype of its inputs."""


def use_accelerator_kernels() -> None:
    """Run what follows as on a GPU: fused attention, optimizers over lists of tensors, a GPU's autocast."""
    F.scaled_dot_product_attention = _attention
    places: tuple[Any, ...] = (sys.modules[Optimizer.__module__], _foreach_utils)
    for place in places:
        place._get_foreach_kernels_supported_devices = lambda: ["cpu", "cuda"]
        place._foreach_supported_types.append(FakeTensor)
    autocast = AcceleratorAutocast()
    autocast.__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process
    nn_module.register_module_forward_pre_hook(autocast.enter_module)
    nn_module.register_module_forward_hook(autocast.leave_module, always_call=True)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the fused kernel that torch would choose on a GPU."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    aten: Any = torch.ops.aten
    attended: Tensor
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and half and query.shape[-1] <= _LARGEST_FLASH_HEAD and query.dim() == 4:
        if enable_gqa:
            key, value = _repeated(query, key, value)
        attended, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return attended
    if query.dim() != 4:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        attended = _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return attended
    if enable_gqa:
        key, value = _repeated(query, key, value)
    if attn_mask is not None:
        attn_mask = _bias(attn_mask, query, key)
    logsumexp = query.requires_grad or key.requires_grad or value.requires_grad
    attended, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, logsumexp, dropout_p, is_causal, scale=scale
    )
    return attended


_plain_attention: Callable[..., Any] = F.scaled_dot_product_attention


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Give every head of the queries its own keys and values."""
    repeats = query.shape[1] // key.shape[1]
    return (key, value) if repeats == 1 else (key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the kernel takes it: added to the scores, and expanded without a copy."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class AcceleratorAutocast(TorchFunctionMode):
    """Cast inputs to fp32 inside of autocast, for the functions that a GPU computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self._entered_for: list[nn.Module] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function as autocast on a GPU would."""
        kwargs = kwargs or {}
        if function in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = [_in_fp32(arg) for arg in args], {name: _in_fp32(arg) for name, arg in kwargs.items()}
        return function(*args, **kwargs)

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Come into force in a module that is recomputed: autograd's engine runs without modes."""
        modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not any(mode is self for mode in modes):
            self.__enter__()  # type: ignore[no-untyped-call]
            self._entered_for.append(module)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """End with the module."""
        if self._entered_for and self._entered_for[-1] is module:
            self._entered_for.pop()
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _in_fp32(arg: Any) -> Any:
    if isinstance(arg, Tensor) and arg.dtype in (torch.float16, torch.bfloat16):
        return arg.float()
    return arg
