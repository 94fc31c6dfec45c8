"""Bring blocks to the device before they compute: two places there, hooks, and the order of copies.

[Note: two places]
Block i computes in place i % 2, in forward passes, in backward passes and in recomputation. What autograd saves of its
parameters are views of that place, so nothing has to be saved or found again: a backward pass needs the same bytes in
the same place. While block i computes, block i + 1 is copied to the other place (i - 1 in backward passes). That copy
waits for what the computing stream has been given so far. This includes all that used the place before: in a forward
pass block i - 1; in a backward pass block i + 1, because autograd executes its nodes in the reverse order of their
creation, and the first node of block i comes after the last one of block i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....runtime.collectives.nested import leaves
from ....runtime.devices.device import has_streams
from ....runtime.streams.mapping import prefetch_pages, release_pages
from ....runtime.streams.read_ahead import ReadAhead
from .blocks import Block
from .traffic import Traffic


class Use(NamedTuple):
    """A block in a pass."""

    block: Block
    backward: bool


class BlockStream:
    """The blocks of one model and their places on the device."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], device: torch.device, traffic: Traffic) -> None:
        self.blocks = blocks
        self.device = device
        self.traffic = traffic
        self.on_backward: Callable[[Block | None, Block], None] = lambda before, block: None
        """Called when the backward pass of a block begins, with the one whose backward pass is over."""
        largest = max(block.num_bytes for block in blocks)
        self._places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self._held: list[Block | None] = [None, None]
        self._copied: list[torch.Event | None] = [None, None]
        self._copying = torch.Stream(device) if has_streams(device) else None
        self._transfers: dict[int, Tensor] = {}
        self._ahead: ReadAhead[Use, None] = ReadAhead()
        self._current: Use | None = None
        for block in blocks:
            self._ahead.add(Use(block, False))
            block.make_leaves(self._places[block.slot])
            block.module.register_forward_pre_hook(self._before_forward(block), prepend=True)
            block.module.register_forward_hook(self._after_forward(block), always_call=True)
        model.register_forward_pre_hook(self._begin, prepend=True)

    def __deepcopy__(self, memo: Any) -> BlockStream:
        return self  # a copy of the model is not streamed: see `_before_forward`

    # --- hooks ------------------------------------------------------------------------------------------------------

    def _begin(self, *_: Any) -> None:
        """Begin a pass of the whole model: parameters may have changed, so nothing on the device is up to date."""
        if in_backward():
            return
        self._restart()
        self._start(Use(self.blocks[0], False))

    def _before_forward(self, block: Block) -> Callable[..., None]:
        def bring(module: nn.Module, args: Any) -> None:
            if module is not block.module:
                raise RuntimeError(
                    f"A copy of {block.name}, which is offloaded, cannot compute: copies are not streamed to the "
                    "device. Copy the model before prepare()."
                )
            self.enter(block, in_backward())
            block.install_leaves()

        return bring

    def _after_forward(self, block: Block) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            block.install(block.params)
            for tensor in leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(  # type: ignore[no-untyped-call]
                        lambda gradient: self.enter(block, True)
                    )

        return leave

    # --- copies -----------------------------------------------------------------------------------------------------

    def enter(self, block: Block, backward: bool) -> None:
        """Let the current stream compute with a block from now on, and start to bring the next one."""
        use, before = Use(block, backward), self._current
        if use == before:  # recomputation, or another output
            return
        if not backward and before is not None and (before.backward or before.block.index >= block.index):
            self._restart()
        self._current = use
        if backward:
            self.on_backward(before.block if before is not None and before.backward else None, block)
        self._ahead.take(use)
        if self._held[block.slot] is not block:
            self._copy(block, self._moment())
        self._wait(block)
        following = self._ahead.next_of(use)
        if following is None and backward and block.index > 0:
            following = Use(self.blocks[block.index - 1], True)
        if following is not None and following.backward == backward and following.block.slot != block.slot:
            self._start(following)

    def _restart(self) -> None:
        self._ahead.restart()
        self._held = [None, None]
        self._current = None

    def _start(self, use: Use) -> None:
        if self._held[use.block.slot] is use.block:
            return
        self._held[use.block.slot] = None
        after = self._moment()
        self._ahead.start(use, lambda: self._copy(use.block, after), self.device)

    def _moment(self) -> torch.Event | None:
        """Return when the computing stream has done what it was given so far."""
        return None if self._copying is None else torch.accelerator.current_stream(self.device).record_event()

    def _copy(self, block: Block, after: torch.Event | None) -> None:
        place = self._places[block.slot][: block.num_bytes]
        self.traffic.bytes_in += block.num_bytes
        prefetch_pages(block.weights)
        if self._copying is None or after is None:
            place.copy_(block.weights)
        else:
            source = self._read(block) if block.buffers.on_disk else block.weights
            with self._copying:
                self._copying.wait_event(after)
                place.copy_(source, non_blocking=True)
            self._copied[block.slot] = self._copying.record_event()
        release_pages(block.weights)
        self._held[block.slot] = block

    def _read(self, block: Block) -> Tensor:
        """Return the parameters of a block, from the disk, in memory that can be copied beside the host."""
        if block.slot not in self._transfers:
            largest = max(each.num_bytes for each in self.blocks)
            self._transfers[block.slot] = block.buffers.transfer(largest)
        copied = self._copied[block.slot]
        if copied is not None:  # the copy before, which reads the same memory
            copied.synchronize()
        return self._transfers[block.slot][: block.num_bytes].copy_(block.weights)

    def _wait(self, block: Block) -> None:
        copied = self._copied[block.slot]
        if copied is not None:
            computing = torch.accelerator.current_stream(self.device)
            with self.traffic.waiting(computing):
                computing.wait_event(copied)


def in_backward() -> bool:
    """Return whether this thread executes a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
