"""Let autograd bring the gradients of blocks to the host while the backward pass goes on.

[Note: two functions]
For autograd, what stands for a block's parameters on the device is a function of those on the host. So it does what it
does with any parameter: it adds up the gradients of several uses, calls hooks, accumulates in `param.grad`, and returns
gradients from `torch.autograd.grad`. There are two such functions, because a gradient that is still being copied must
not be added to another one. `_ToDevice` runs backward on the thread of the device as soon as the gradients of a block
are complete, and starts to copy them. `_OnHost` runs backward on the thread that called `backward`, and waits for the
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ....errors import UnsupportedSettingError
from ....runtime.devices.device import activate, has_streams, is_cpu
from ...modules.memory.stepping import hook_gradient
from .blocks import Block
from .buffers import BufferPool
from .traffic import Traffic

Gradients = tuple[Tensor | None, ...]


class Passage:
    """One use of a block's parameters by autograd."""

    def __init__(self, gradients: HostGradients, block: Block, indices: Sequence[int]) -> None:
        self.gradients, self.block, self.indices = gradients, block, indices
        self.copied: torch.Event | None = None

    def chosen(self, values: Gradients) -> list[tuple[int, Tensor]]:
        """Return the gradients that there are, with the numbers of their parameters."""
        return [(index, value) for index, value in zip(self.indices, values, strict=True) if value is not None]


class _OnHost(Function):
    """Return what stands for parameters on the host."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.passage = passage
        return tuple(param.data for param in params)

    @staticmethod
    def backward(ctx: Any, *values: Tensor | None) -> Any:
        return None, *ctx.passage.gradients.arrive(ctx.passage, values)


class _ToDevice(Function):
    """Return what stands for parameters on the device, where streaming has brought them."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.passage = passage
        return tuple(passage.block.on_device[index].data for index in passage.indices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.passage.gradients.send(ctx.passage, gradients)


class HostGradients:
    """The way of gradients from the device to the parameters on the host."""

    def __init__(self, device: torch.device, num_processes: int, pool: BufferPool, traffic: Traffic) -> None:
        self.device = device
        self.num_processes = num_processes
        self.traffic = traffic
        self.when_complete: Callable[[Block], None] = lambda block: None
        """Called on another thread when the gradients of a block are complete."""
        self.when_late: Callable[[Block], None] = lambda block: None
        """Called when a block gets more gradients after they seemed to be complete."""
        self._pool = pool
        self._leaving = torch.Stream(device) if has_streams(device) else None
        self._blocks: dict[int, Block] = {}
        self._expected: dict[int, set[int]] = {}
        """The parameters of each block that autograd has still to accumulate gradients of."""
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}
        """Where the averaged gradient of a parameter is, and its version."""
        self._local: set[tuple[int, int]] = set()
        """Parameters with gradients that are not averaged."""
        self._futures: dict[int, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps", initializer=activate, initargs=(device,))
        finalize(self, self._thread.shutdown, wait=False)

    def __deepcopy__(self, memo: Any) -> HostGradients:
        return self

    def follow(self, block: Block) -> None:
        """Learn when the gradients of a block's parameters are complete."""
        self._blocks[block.index] = block
        for index, param in enumerate(block.params):
            if not (param.is_floating_point() or param.is_complex()):
                continue
            if self.num_processes > 1:
                hook_gradient(param, self._calling(HostGradients._compare, block, index), accumulated=False)
            hook_gradient(param, self._calling(HostGradients._accumulated, block, index), accumulated=True)

    def _calling(self, method: Callable[..., None], block: Block, index: int) -> Callable[[Tensor], None]:
        me, number = ref(self), block.index  # Python's garbage collector does not see the hooks of a tensor

        def call(tensor: Tensor) -> None:
            if (gradients := me()) is not None:
                method(gradients, gradients._blocks[number], index, tensor)

        return call

    def stand_for(self, block: Block) -> list[Tensor]:
        """Return what a block computes with on the device."""
        tensors: list[Tensor] = list(block.on_device)
        trained = [index for index, param in enumerate(block.params) if param.requires_grad]
        if trained and torch.is_grad_enabled():
            passage = Passage(self, block, trained)
            to_host, to_device = cast(Any, _OnHost).apply, cast(Any, _ToDevice).apply
            on_host = to_host(passage, *(block.params[index] for index in trained))
            for index, tensor in zip(trained, to_device(passage, *on_host), strict=True):
                tensor._is_param = True  # for isinstance(weight, nn.Parameter)
                tensors[index] = tensor
        return tensors

    # --- on the device ----------------------------------------------------------------------------------------------

    def send(self, passage: Passage, gradients: Gradients) -> Gradients:
        """Start to copy the gradients of a block to the host; later work of the device does not wait."""
        if torch.is_grad_enabled():
            raise no_double_backward()
        if self._leaving is None:
            return self._send(passage, gradients, None)
        moment = torch.accelerator.current_stream(self.device).record_event()
        with self._leaving:
            self._leaving.wait_event(moment)
            values = self._send(passage, gradients, self._leaving)
            passage.copied = self._leaving.record_event()
        return values

    def _send(self, passage: Passage, gradients: Gradients, stream: torch.Stream | None) -> Gradients:
        block = passage.block
        computed = dict(passage.chosen(gradients))
        for gradient in computed.values():
            if gradient.layout != torch.strided:
                raise RuntimeError(f"{block.name} has a sparse gradient, which offload does not bring to the host.")
            if stream is not None:
                gradient.record_stream(stream)
            self.traffic.bytes_out += gradient.nbytes
        if self.num_processes > 1:
            self._average_all(block, computed)
        if not is_cpu(self.device):
            for index, place in block.places(list(computed), self._pool).items():
                computed[index] = place.copy_(computed[index], non_blocking=stream is not None)
        return tuple(computed.get(index) for index in passage.indices)

    def _average_all(self, block: Block, computed: dict[int, Tensor]) -> None:
        """Average gradients over the processes, except for those that hooks are to see before, as under DDP."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, gradient in computed.items():
            if self._has_hooks(block.params[index]):
                self._local.add((block.index, index))
            else:
                by_dtype.setdefault(gradient.dtype, []).append(index)
        for indices in by_dtype.values():
            averages = self._averages([computed[index] for index in indices])
            computed.update(zip(indices, averages, strict=True))

    def _averages(self, gradients: list[Tensor]) -> list[Tensor]:
        """Average gradients as DDP does: each process divides its own, and they are added."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat.div_(self.num_processes)
        dist.all_reduce(flat)
        parts = torch.split(flat, [each.numel() for each in gradients])
        # .data: with versions of their own
        return [part.view(gradient.shape).data for part, gradient in zip(parts, gradients, strict=True)]

    # --- on the host ------------------------------------------------------------------------------------------------

    def arrive(self, passage: Passage, values: Gradients) -> Gradients:
        """Wait until the gradients of a block are on the host."""
        block = passage.block
        arrived = dict(passage.chosen(values))
        if not arrived:
            return values
        if block.index in self._futures:
            self.when_late(block)
        self._expected.setdefault(block.index, set()).update(arrived)
        if passage.copied is not None:
            with self.traffic.host_waiting(self.device, measures=block.index == 0):
                passage.copied.synchronize()
        if block.buffers.on_disk:
            new = [index for index in arrived if block.params[index].grad is None]
            for index, place in block.places(new, block.gradients).items():
                arrived[index] = place.copy_(arrived[index])
        if self.num_processes > 1:
            for index, value in arrived.items():
                self._sent[block.index, index] = _identity(value)
        return tuple(arrived.get(index) for index in passage.indices)

    def _compare(self, block: Block, index: int, gradient: Tensor) -> None:
        """Note a gradient that is not the averaged one: uses of a parameter outside of its block add to it."""
        if self._sent.pop((block.index, index), None) != _identity(gradient):
            self._local.add((block.index, index))

    def _accumulated(self, block: Block, index: int, param: Tensor) -> None:
        if block.index in self._futures:
            self.when_late(block)
        expected = self._expected.get(block.index)
        if not expected:  # a use of the parameter outside of the block
            return
        expected.discard(index)
        is_final = not any(key[0] == block.index for key in self._local)
        if not expected and is_final and not any(map(self._changes_later, block.params)):
            self._settle(block.index)
            self._futures[block.index] = self._thread.submit(self._complete, block)

    def _complete(self, block: Block) -> None:
        self.when_complete(block)
        block.release()

    def _has_hooks(self, param: Tensor) -> bool:
        """Return whether a parameter has hooks besides those of this class."""
        return len(param._backward_hooks or ()) > 1 or self._changes_later(param)

    def _changes_later(self, param: Tensor) -> bool:
        """Return whether hooks see the accumulated gradient, perhaps after this class."""
        return len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) > 1

    def _settle(self, number: int) -> None:
        future = self._futures.pop(number, None)
        if future is not None:
            future.result()

    def discard(self) -> None:
        """Forget a backward pass that failed."""
        self._local.clear()
        self.finish()

    def finish(self) -> None:
        """Wait for what follows from complete gradients, and average what could not be averaged before."""
        self._expected.clear()
        self._sent.clear()
        for number in list(self._futures):
            self._settle(number)
        params = [self._blocks[number].params[index] for number, index in sorted(self._local)]
        self._local.clear()
        for gradient in [param.grad for param in params if param.grad is not None]:
            [average] = self._averages([gradient.to(self.device)])
            gradient.copy_(average)


def no_double_backward() -> UnsupportedSettingError:
    """Return the error for a backward pass that is to be differentiated itself."""
    return UnsupportedSettingError(
        "offload with create_graph=True",
        "to differentiate a backward pass takes the weights of all blocks on the device at the same time.",
        "Leave offload out, or the term of the loss that takes gradients of gradients.",
    )


def _identity(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version
