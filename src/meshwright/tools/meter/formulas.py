"""The FLOPs of an operation: torch's formulas, and those for what they leave out or count wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def flops_of(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of an operation; 0 for one that nobody has a formula for."""
    formula = _formulas().get(packet) or flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    aten: Any = torch.ops.aten
    own: dict[Any, Callable[..., int]] = {
        # Of a convolution in groups torch counts every pair of channels in the gradient of the weights.
        aten.convolution_backward: _convolution_backward,
        # The attention and the LSTM of CPUs, and the recurrent layers of GPUs.
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
        aten.mkldnn_rnn_layer: _lstm_layer,
        aten.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _lstm_layer(*args, **kwargs),
        aten._cudnn_rnn: _recurrent_layers,
        aten._cudnn_rnn_backward: lambda *args, **kwargs: 2 * _recurrent_layers(*args, **kwargs),
        aten.miopen_rnn: _recurrent_layers,
        aten.miopen_rnn_backward: lambda *args, **kwargs: 2 * _recurrent_layers(*args, **kwargs),
    }
    return own


def _convolution_backward(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """Count either gradient, of the inputs and of the weights, like the forward pass."""
    meets_weights = inputs if transposed else gradient  # each of its elements meets one row of the weights
    forward = 2 * meets_weights.numel() * weight.numel() // weight.shape[0]
    return forward * sum(output_mask[:2])


def _lstm_layer(inputs: Tensor, first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    return _products(inputs, (first, second))


def _recurrent_layers(inputs: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _products(inputs, weights)


def _products(inputs: Tensor, weights: Sequence[Tensor]) -> int:
    """Count the product of every element of the sequences, (..., features), with every matrix."""
    rows = inputs.numel() // inputs.shape[-1]
    return 2 * rows * sum(weight.numel() for weight in weights if weight.dim() == 2)
