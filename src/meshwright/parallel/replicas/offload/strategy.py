"""Offloaded blocks: a replica on every process whose repeated blocks are kept on the host.

The parameters of blocks stay what they are, on the host: the optimizer, checkpoints and clipping find them there. On
the device other parameters stand for them, two blocks at a time: [Note: two places] in `streaming.py`. Everything
outside of the blocks is on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from ....config.plugins.handlers import DistributedDataParallelKwargs
from ....config.plugins.offload import OffloadConfig
from ....runtime.group.runtime import Runtime
from ...base import Bundle, Capabilities, params_of
from ...modules.spread import Layout
from ..ddp import DataParallel
from .blocks import Block, blocks_of
from .buffers import BufferPool, Buffers
from .gradients import HostGradients, no_double_backward
from .stepping import BlockSteps
from .streaming import BlockStream
from .traffic import Traffic, megabytes


class StreamedBlocks(DataParallel):
    """Train replicas of models that do not fit on the device."""

    capabilities = Capabilities()

    def __init__(
        self, runtime: Runtime, config: OffloadConfig, handler: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(runtime, handler)
        self.config = config
        self.traffic = Traffic()
        self.stepping = BlockSteps(config.step_in_backward, config.placement == "disk", self._blocks)
        self.stepping.on_step = self._count_step
        self.report: str | None = None
        """What is where, and what it costs: known after the third step."""
        self._streams: MutableMapping[nn.Module, BlockStream] = WeakKeyDictionary()
        self._gradients: MutableMapping[nn.Module, HostGradients] = WeakKeyDictionary()
        self._runs_backward = False
        self._finishes_itself = False

    # --- prepare ----------------------------------------------------------------------------------------------------

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        return "blocks on the host, and a copy of the rest on each process"

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return False: blocks that are spread already cannot be kept on the host."""
        return False

    def prepare(self, bundle: Bundle) -> Bundle:
        """Keep the blocks of the models on the host, place the rest, and follow the optimizers' steps."""
        buffers = Buffers(self.config, self.runtime.device)
        for model, place in zip(bundle.models, bundle.place_models, strict=True):
            blocks = blocks_of(model, self.config.block_classes, buffers, required=not bundle.evaluation)
            self._place_rest(model, blocks, place)
            if blocks:
                self._stream(model, blocks)
        prepared = super().prepare(replace(bundle, place_models=[False] * len(bundle.models)))
        self.stepping.accumulation_steps = bundle.accumulation_steps
        offloaded = {id(param) for block in self._blocks() for param in block.params}
        self.stepping.add(
            [each for each in bundle.optimizers if any(id(param) in offloaded for param in params_of(each))]
        )
        return prepared

    def _place_rest(self, model: nn.Module, blocks: list[Block], place: bool) -> None:
        """Move what is outside of the blocks to the device, if it is to be placed."""
        for block in blocks:
            self._successors.update(block.replaced)
            block.take_out()
        try:
            if place:
                self._move(model)
        finally:
            for block in blocks:
                block.install(block.params)

    def _blocks(self) -> Iterator[Block]:
        for stream in self._streams.values():
            yield from stream.blocks

    def _stream(self, model: nn.Module, blocks: list[Block]) -> None:
        device = self.runtime.device
        stream = BlockStream(model, blocks, device, self.traffic)
        gradients = HostGradients(
            device, self.runtime.num_processes, BufferPool(blocks[0].buffers.transfer), self.traffic
        )
        gradients.when_complete = self.stepping.step
        gradients.when_late = self.stepping.gradient_came_late
        for block in blocks:
            gradients.follow(block)
            if self.runtime.num_processes > 1:
                self._share(block)
        stream.stand_for = gradients.stand_for
        stream.on_forward = self._begin_forward
        stream.on_backward = self._begin_backward
        model.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda *_: self.stepping.refuse_if_stepped("state_dict() was called")
        )
        self._gradients[model] = gradients
        self._streams[model] = stream

    def _share(self, block: Block) -> None:
        """Let all processes have the parameters of rank 0, as DDP does."""
        on_device = block.weights.to(self.runtime.device)
        dist.broadcast(on_device, 0)
        block.weights.copy_(on_device)
        block.release()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap what is not offloaded in DDP, if there are several processes."""
        if self.runtime.num_processes == 1:
            return model
        names = {id(param): name for name, param in model.named_parameters()}
        offloaded = [names[id(param)] for block in self._streams[model].blocks for param in block.params]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, offloaded
        )
        if all(name in offloaded for name, param in model.named_parameters() if param.requires_grad):
            return model
        return super().wrap(model)

    # --- the step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass; at its end gradients of blocks are complete on the host."""
        if options.get("create_graph"):
            raise no_double_backward()
        self._finishes_itself = True
        try:
            super().backward(loss, **options)
        except BaseException:
            self._abandon_backward()
            raise
        finally:
            self._finishes_itself = False
        self._end_backward()

    def objection_to_early_steps(self, params: Sequence[Tensor]) -> str:
        """Refuse: blocks step by a setting of their own."""
        return "offloaded blocks step in the backward pass by themselves (OffloadConfig(step_in_backward=...))."

    def _begin_forward(self) -> None:
        if self._runs_backward:  # the script's loss.backward() has failed
            self._abandon_backward()
        self.stepping.begin_forward()

    def _begin_backward(self) -> None:
        if self._runs_backward:
            return
        self.stepping.begin_backward()
        self._runs_backward = True
        if not self._finishes_itself:  # the script has called loss.backward()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _abandon_backward(self) -> None:
        self._runs_backward = False
        self._stand_down()
        for gradients in list(self._gradients.values()):
            gradients.discard()

    def _stand_down(self) -> None:
        for stream in list(self._streams.values()):
            stream.stand_down()

    def _end_backward(self) -> None:
        if not self._runs_backward:
            return
        self._runs_backward = False
        self._stand_down()
        with self.traffic.host_waiting(self.runtime.device):
            for gradients in list(self._gradients.values()):
                gradients.finish()
        self.stepping.end_backward()

    def _count_step(self) -> None:
        if self.report is not None or not self.traffic.is_measured(self.runtime.device):
            return
        blocks = list(self._blocks())
        offloaded = {id(param) for block in blocks for param in block.params}
        on_device = [param for model in self._streams for param in model.parameters() if id(param) not in offloaded]
        self.report = self.traffic.describe(
            f"{len(blocks)} blocks ({megabytes(sum(block.num_bytes for block in blocks))}) on the "
            f"{self.config.placement}, the rest ({megabytes(sum(param.nbytes for param in on_device))}) on "
            f"{self.runtime.device}",
            self.runtime.device,
        )
        if self.runtime.is_main_process:
            print(self.report, file=sys.stderr, flush=True)

    def scale_gradients(self, models: Iterable[nn.Module], factor: Tensor) -> None:
        """Multiply the accumulated gradients, on the device and on the host."""
        for model in models:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(factor.to(param.grad.device, param.grad.dtype))

    def clip_grad_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients by their norm; return the norm before clipping.

        The norms of single gradients are in the order of the parameters, as if all were in one place.
        """
        current = self.current(parameters)
        given = [current] if isinstance(current, Tensor) else list(current)
        gradients = [param.grad for param in given if param.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        norms: list[Tensor] = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
        together = torch.stack([norm.to(self.runtime.device) for norm in norms])
        total: Tensor = torch.linalg.vector_norm(together, norm_type)
        torch.nn.utils.clip_grads_with_norm_(given, max_norm, total)
        for block in self._blocks():
            block.release()
        return total
