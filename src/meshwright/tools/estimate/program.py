"""Trace a small program around a model, in a forked process: two training steps with Adam, or a forward pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...accelerator import Accelerator
from ...config.environment import SETTING_VARIABLES, variable_of
from ...config.plugins.offload import OffloadConfig
from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...inference.estimating.batches import Loss, ModelArguments, default_loss
from ...parallel.modules.memory.activations import recompute_activations
from ...parallel.modules.memory.stepping import step_in_backward
from ...runtime.collectives.nested import recursively_apply
from ...state import AcceleratorState
from ...temporary import temporary_folder
from ..plan.memory.peak import Memory
from ..plan.plan import FEW, MORE, Depths
from ..plan.trace import Trace, read_trace
from ..plan.tracing.models import Truncation
from ..plan.tracing.script import TracedScript, TraceRequest, trace_script
from .levers import (
    EIGHT_BITS,
    HOST_INPUTS,
    IN_BACKWARD,
    LINEAR_LOSS,
    RECOMPUTE,
    STREAMED,
    EightBitAdam,
    loss_without_logits,
)

_SECONDS = 600.0
_RANKS_PER_NODE = 8


class NotTracedError(ValueError):
    """Report a model that does not run on fake tensors.

    The message has the model's own error. Give a batch that the model takes, and change code that needs the numbers of
    a tensor.
    """


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is done with a model, and on how many processes."""

    model: nn.Module
    """On any device; it is left as it is."""
    batch: ModelArguments | None
    """None leaves the forward pass out: all parameters get gradients without it."""
    stored_in: torch.dtype
    training: bool = True
    loss: Loss | None = None
    mixed_precision: str = "no"
    processes: int = 1
    fsdp: bool = False
    reshard_after_forward: bool = True
    lever: str | None = None
    """What saves memory: a name of `levers.LEVERS`."""

    def memory(self) -> tuple[Memory, Trace]:
        """Return the memory of the first process, and a trace of it."""
        blocks = Truncation(None)
        blocks.apply(self.model)
        traces = self.traces([None] if blocks.found <= MORE[0] else [FEW, MORE])
        depths = Depths(traces[0], traces[-1])
        return depths.memory(), depths.larger

    def traces(self, sizes: Sequence[tuple[int, int] | None]) -> list[Trace]:
        """Trace the first process with so many of the repeated blocks; None stands for all of them."""
        if dist.is_initialized():
            raise RuntimeError("this process belongs to a process group. Estimate the memory in one that does not.")
        with temporary_folder("estimate") as folder:
            outputs = [folder / str(index) for index in range(len(sizes))]
            children = [self._start(size, output) for size, output in zip(sizes, outputs, strict=True)]
            return [_finish(child, output) for child, output in zip(children, outputs, strict=True)]

    def _start(self, blocks: tuple[int, int] | None, output: Path) -> BaseProcess:
        request = TraceRequest(rank=0, world_size=self.processes, output=output, blocks=blocks)
        child = get_context("fork").Process(target=_in_child, args=(self, request))
        child.start()
        return child

    # --- in the child -----------------------------------------------------------------------------------------------

    def run(self, script: TracedScript) -> None:
        """Run the program; the script ends this process."""
        # The blocks step in the backward pass from the first step on, as from the second one in a script.
        offload = OffloadConfig(step_in_backward=True) if self.lever == STREAMED else None
        accelerator = Accelerator(
            cpu=True, mixed_precision=self.mixed_precision, fsdp_plugin=self._plugin(), offload=offload
        )
        script.hide_data()
        model = _Fakes(self.stored_in).model(self.model).train(self.training)
        if self.batch is None:
            model.forward = lambda: _sum_of_parameters(model)
        if self.training:
            self._train(accelerator, model)
        batch = self._new_batch()
        model = accelerator.prepare(model)
        with torch.no_grad():
            outputs = model(*batch.args, **batch.kwargs)
            script.end()
            del outputs

    def _train(self, accelerator: Accelerator, model: nn.Module) -> None:
        if self.lever in (RECOMPUTE, HOST_INPUTS):
            recompute_activations(model, offload=self.lever == HOST_INPUTS)
        elif self.lever == LINEAR_LOSS:
            loss_without_logits(model)
        optimizer: Any = (EightBitAdam if self.lever == EIGHT_BITS else torch.optim.AdamW)(model.parameters())
        if self.lever == IN_BACKWARD:
            step_in_backward(optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        while True:
            batch = self._new_batch()
            outputs = model(*batch.args, **batch.kwargs)
            accelerator.backward((self.loss or default_loss)(outputs, batch))
            del batch, outputs
            optimizer.step()
            optimizer.zero_grad()

    def _new_batch(self) -> ModelArguments:
        return _Fakes(self.stored_in).batch(self.batch or ModelArguments())

    def _plugin(self) -> FullyShardedDataParallelPlugin | None:
        if not self.fsdp:
            return None
        return FullyShardedDataParallelPlugin(reshard_after_forward=self.reshard_after_forward)


def _in_child(program: Program, request: TraceRequest) -> None:
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)  # the threads of the parent are not here
        AcceleratorState._reset_state(reset_partial_state=True)
        _set_environment(request.world_size)
        program.run(trace_script(request))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        _reason_file(request.output).write_text(f"{type(error).__name__}: {reason[:300]}", encoding="utf-8")
    finally:
        os._exit(code)


def _set_environment(processes: int) -> None:
    for name, _ in SETTING_VARIABLES.values():
        os.environ.pop(name, None)
    here = min(processes, _RANKS_PER_NODE)
    os.environ[variable_of("first_steps")] = "off"
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": here}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})  # nobody connects


def _reason_file(output: Path) -> Path:
    return output.with_suffix(".reason")


def _finish(child: BaseProcess, output: Path) -> Trace:
    child.join(_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        raise NotTracedError(f"it had not ended after {_SECONDS:.0f} s")
    if not output.exists():
        reason = _reason_file(output)
        raise NotTracedError(reason.read_text(encoding="utf-8") if reason.exists() else f"exit code {child.exitcode}")
    return read_trace(output)


def _sum_of_parameters(model: nn.Module) -> Tensor:
    """Return a number that depends on all parameters, of sharded ones on this process's part."""
    local = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
    return torch.stack([param.sum().float() for param in local if param.requires_grad]).sum()


class _Fakes:
    """Replace tensors by fake ones, floating-point ones in a dtype. Tied tensors stay tied."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def model(self, model: nn.Module) -> nn.Module:
        """Replace the tensors of a model, including those in plain attributes of modules."""
        for module in model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for place in places:
                place.update({name: self._tensor(value) for name, value in place.items() if isinstance(value, Tensor)})
        return model

    def batch(self, batch: ModelArguments) -> ModelArguments:
        """Replace the tensors of a batch."""
        replace: Callable[[Any], Any] = self._tensor
        args, kwargs = recursively_apply(replace, [batch.args, dict(batch.kwargs)])
        keywords: Mapping[str, Any] = kwargs
        return ModelArguments(args=tuple(args), kwargs=keywords)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._known[id(tensor)] = tensor, made
        return self._known[id(tensor)][1]
