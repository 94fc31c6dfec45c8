"""Bring gradients of blocks to the host while the backward pass goes on, and add them up there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ....runtime.devices.device import activate, has_streams
from .blocks import Block
from .traffic import Traffic


class Arrival(NamedTuple):
    """A gradient that is on its way to the host."""

    number: int
    value: Tensor
    adds_up: bool
    """The parameter has a gradient already."""


class HostGradients:
    """The way of gradients from the device to the parameters on the host."""

    def __init__(self, device: torch.device, num_processes: int, traffic: Traffic) -> None:
        self.device = device
        self.num_processes = num_processes
        self.traffic = traffic
        self.when_complete: Callable[[Block], None] = lambda block: None
        """Called on the thread of the host when the gradients of a block are complete."""
        self._leaving = torch.Stream(device) if has_streams(device) else None
        self._event: torch.Event | None = None
        self._computed: dict[int, list[tuple[int, Tensor]]] = {}
        self._futures: dict[int, Future[None]] = {}
        self._blocks: dict[int, Block] = {}
        self._transfers: dict[int, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradients", initializer=activate, initargs=(device,))
        finalize(self, self._thread.shutdown, wait=False)

    def __deepcopy__(self, memo: Any) -> HostGradients:
        return self

    def follow(self, block: Block) -> None:
        """Take the gradients of a block's parameters on the device as soon as each is complete."""
        self._blocks[block.index] = block
        for index, leaf in enumerate(block.leaves):
            leaf.register_post_accumulate_grad_hook(self._taking(block, index))  # type: ignore[no-untyped-call]

    def _taking(self, block: Block, index: int) -> Callable[[Tensor], None]:
        me = ref(self)  # Python's garbage collector does not see the hooks of a tensor
        name, number = block.name, block.index

        def take(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            gradients = me()
            assert gradient is not None
            assert gradients is not None
            if gradient.layout != torch.strided:
                raise RuntimeError(f"{name} has a sparse gradient, which offload does not bring to the host.")
            gradients._computed.setdefault(number, []).append((index, gradient))

        return take

    def send(self, block: Block) -> None:
        """Send the gradients that were computed for a block to the host; later work of the device does not wait."""
        computed = self._computed.pop(block.index, None)
        if not computed:
            return
        self._settle(block)
        if self._event is not None:  # the device holds the gradients of two blocks at most
            self._event.synchronize()
        if self._leaving is None:
            self._send(block, computed, None)
            return
        moment = torch.accelerator.current_stream(self.device).record_event()
        with self._leaving:
            self._leaving.wait_event(moment)
            self._send(block, computed, self._leaving)

    def _send(self, block: Block, computed: list[tuple[int, Tensor]], stream: torch.Stream | None) -> None:
        for _, gradient in computed:
            if stream is not None:
                gradient.record_stream(stream)
        if self.num_processes > 1:
            self._average([gradient for _, gradient in computed])
        arrivals = []
        for index, gradient in computed:
            adds_up = block.params[index].grad is not None
            stays = not adds_up and not block.buffers.on_disk
            value = block.gradient(index) if stays else self._transfer(block, index)
            value.copy_(gradient, non_blocking=stream is not None)
            self.traffic.bytes_out += gradient.nbytes
            arrivals.append(Arrival(index, value, adds_up))
        self._event = None if stream is None else stream.record_event()
        self._futures[block.index] = self._thread.submit(self._arrive, block, arrivals, self._event)

    def _average(self, gradients: list[Tensor]) -> None:
        """Average gradients over the processes as DDP does: each process divides its own, and they are added."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for group in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in group])
            flat.div_(self.num_processes)
            dist.all_reduce(flat)
            for gradient, average in zip(group, torch.split(flat, [each.numel() for each in group]), strict=True):
                gradient.copy_(average.view(gradient.shape))

    def _transfer(self, block: Block, index: int) -> Tensor:
        """Return memory for a gradient that is added to another one, or written to disk."""
        for other in [self._blocks[number] for number in self._futures]:
            if other.slot == block.slot:  # its gradients may be in the same memory
                self._settle(other)
        if block.slot not in self._transfers:
            largest = max(each.num_bytes for each in self._blocks.values())
            self._transfers[block.slot] = block.buffers.transfer(largest)
        return block.spans[index].of(self._transfers[block.slot])

    def _arrive(self, block: Block, arrivals: list[Arrival], event: torch.Event | None) -> None:
        if event is not None:
            event.synchronize()
        for index, value, adds_up in arrivals:
            gradient = block.params[index].grad
            if adds_up and gradient is not None:
                gradient.add_(value)
            else:
                block.params[index].grad = block.gradient(index).copy_(value) if block.buffers.on_disk else value
        self.when_complete(block)
        block.release()

    def _settle(self, block: Block) -> None:
        future = self._futures.pop(block.index, None)
        if future is not None:
            future.result()

    def discard(self) -> None:
        """Forget the gradients of a backward pass that failed, except those that are on their way."""
        self._computed.clear()
        self.finish()

    def finish(self) -> None:
        """Wait until all gradients are on the host, and what follows from them is done."""
        for index in list(self._computed):
            self.send(self._blocks[index])
        for index in list(self._futures):
            self._settle(self._blocks[index])
        self._event = None
