"""Kernels that are chosen as on a GPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

from meshwright.tools.meter.formulas import flops_of
from meshwright.tools.plan.tracing.kernels import AcceleratorAutocast


def test_a_block_is_recomputed_in_the_formats_of_its_forward_pass() -> None:
    """Autograd's engine runs without modes: recomputation would use a CPU's formats, which checkpoint refuses."""
    mode = AcceleratorAutocast()
    hooks = [
        nn_module.register_module_forward_pre_hook(mode.enter_module),
        nn_module.register_module_forward_hook(mode.leave_module, always_call=True),
    ]
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    try:
        with mode, torch.autocast("cpu", dtype=torch.bfloat16):
            output = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
            output.float().sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    assert model[1].weight.grad is not None


def test_attention_of_a_cpu_has_the_flops_of_a_gpus() -> None:
    query, key = torch.ones(2, 3, 8, 4), torch.ones(2, 3, 6, 4)
    aten = torch.ops.aten
    forward = flops_of(aten._scaled_dot_product_flash_attention_for_cpu, (query, key, key), {}, query)
    backward = flops_of(
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        (query, query, key, key, query, query, 0.0, False),
        {},
        query,
    )
    assert forward == 2 * 2 * (2 * 3) * 8 * 6 * 4
    assert backward == 2.5 * forward
