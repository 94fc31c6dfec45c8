"""Count the FLOPs of a step by torch's formulas, recomputation apart."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from .formulas import flops_of

_ATTENTION_BACKWARD = {
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_backward",
    "_efficient_attention_backward",
}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the FLOPs of all operations on this process between `start` and `stop`.

    Of a tensor that is spread over a mesh it counts the operations on the local part, so that the sum over ranks is
    what the devices compute. A compiled model runs eagerly meanwhile: inside of its kernels nothing can be counted,
    and a frame that is first called under a mode like this one would never be compiled.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.recomputed = 0
        """FLOPs of what the backward pass repeats: by activation checkpointing, or the scores inside of attention."""
        self._stance = ExitStack()

    def start(self) -> None:
        """Count from here on."""
        if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and importing it takes seconds
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> bool:
        """Stop counting; return False where a mode that the script entered since has to end first."""
        if _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._stance.close()
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and count it."""
        if isinstance(function, HigherOrderOperator) or any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here by themselves
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = function._overloadpacket
        flops = flops_of(packet, args, kwargs, result)
        if flops and not _is_without_data(args):
            repeated = flops if _is_recomputing() else _repeated_by_attention(packet, args, flops)
            self.recomputed += repeated
            self.flops += flops - repeated
        return result


def _is_without_data(args: Any) -> bool:
    """Return whether nothing is computed: DTensor finds the shape of a result so."""
    return any(isinstance(arg, Tensor) and (arg.is_meta or isinstance(arg, FakeTensor)) for arg in args)


def _repeated_by_attention(packet: Any, args: Any, flops: int) -> int:
    """Return the FLOPs of the scores, computed again by the backward pass of fused attention: one product of five."""
    if packet.__name__ not in _ATTENTION_BACKWARD:
        return 0
    query, value = int(args[1].shape[-1]), int(args[3].shape[-1])
    return flops * query // (3 * query + 2 * value)


def _is_recomputing() -> bool:
    """Return whether activation checkpointing repeats a part of the forward pass."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False  # not in a backward pass, or in one of its own operations
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
