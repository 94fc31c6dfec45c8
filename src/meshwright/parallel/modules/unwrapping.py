"""Unwrap prepared models."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...precision.amp import remove_forward_wrapper

_WRAPPERS_IN_NAMES = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
_PARALLEL_WRAPPERS = (DistributedDataParallel, DataParallel)


def own_name(name: str) -> str:
    """Return a parameter's name in the user's own model."""
    for wrapper in _WRAPPERS_IN_NAMES:
        name = name.replace(wrapper, "")
    return name


def _wrappers() -> tuple[type[nn.Module], ...]:
    """Return the wrapper classes with the user's model in `module`; DeepSpeed's only if it is imported."""
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    return _PARALLEL_WRAPPERS if engine is None else (*_PARALLEL_WRAPPERS, engine)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether this is what `torch.compile` returned for a module."""
    return hasattr(module, "_orig_mod")


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """Return the user's model without parallel wrappers.

    `keep_fp32_wrapper=False` also restores the model's own forward, without autocast. `keep_torch_compile=False`
    returns the module that was compiled. `recursive` also unwraps the model's children.
    """
    compiled = None
    if is_compiled_module(model):
        compiled, model = model, model._orig_mod  # type: ignore[assignment]
    wrappers = _wrappers()
    while isinstance(model, wrappers):
        model = model.module  # type: ignore[assignment]
        if is_compiled_module(model):
            compiled, model = model, model._orig_mod  # type: ignore[assignment]
    if recursive:
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True))
    if not keep_fp32_wrapper:
        remove_forward_wrapper(model)
    if keep_torch_compile and compiled is not None:
        # The parallel wrapper may be what was compiled, and is still used for training: do not change it.
        return compiled if compiled._orig_mod is model else type(compiled)(model, compiled.dynamo_ctx)
    return model


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is a `PeftModel`, without importing peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)
