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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....runtime.collectives.nested import leaves
from ....runtime.devices.device import has_streams
from ....runtime.streams.mapping import prefetch_pages, release_pages
from ....runtime.streams.read_ahead import ReadAhead
from .blocks import Block, Sources
from .gradients import no_double_backward
from .traffic import Traffic

_PLAIN = (Tensor, int, float, str, type(None))
"""Outputs without other tensors inside."""


class Use(NamedTuple):
    """A block in a pass."""

    block: Block
    backward: bool


class Loan:
    """What one pass of a block computes with; its backward pass needs the same values."""

    def __init__(self, block: Block, sources: Sources, tensors: Sequence[Tensor]) -> None:
        self.block, self.sources, self.tensors = block, sources, tensors
        self._params = versions_of(block.params)
        self._tensors = versions_of(tensors)

    def give_back(self) -> None:
        """Let the parameters have what the block wrote to them in its forward pass."""
        now = versions_of(self.tensors)
        if now == self._tensors:
            return
        for index, (tensor, param) in enumerate(zip(self.tensors, self.block.params, strict=True)):
            if now[index] != self._tensors[index]:
                with torch.no_grad():
                    param.copy_(tensor)
                self._params[index] = param._version

    def check(self) -> None:
        """Let autograd raise its error if it needs a parameter that was changed in place since."""
        now = versions_of(self.block.params)
        for tensor, before, after in zip(self.tensors, self._params, now, strict=True):
            if before != after:
                torch.autograd.graph.increment_version(tensor)
        self._params = now


class Contents(NamedTuple):
    """What a place on the device holds."""

    block: Block
    sources: Sources
    versions: list[int]


class BlockStream:
    """The blocks of one model and their places on the device."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], device: torch.device, traffic: Traffic) -> None:
        self.blocks = blocks
        self.device = device
        self.traffic = traffic
        self.stand_for: Callable[[Block], Sequence[Tensor]] = lambda block: block.on_device
        """Returns what a block computes with on the device."""
        self.on_forward: Callable[[], None] = lambda: None
        """Called when the forward pass of a block begins."""
        self.on_backward: Callable[[], None] = lambda: None
        """Called when the backward pass of a block begins."""
        largest = max(block.num_bytes for block in blocks)
        self._places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self._held: list[Contents | None] = [None, None]
        self._sources: dict[int, Sources] = {}
        """By the number of each block whose last forward pass has a backward pass, what it computed with."""
        self._copied: list[torch.Event | None] = [None, None]
        self._copying = torch.Stream(device) if has_streams(device) else None
        self._transfers: dict[int, Tensor] = {}
        self._ahead: ReadAhead[Use, None] = ReadAhead()
        self._current: Use | None = None
        self._running: dict[int, Loan] = {}
        """By the number of each block that computes now, with what."""
        self._standing: Loan | None = None
        for block in blocks:
            self._ahead.add(Use(block, False))
            block.place(self._places[block.slot])
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
        self.stand_down()
        self._restart()
        self._start(Use(self.blocks[0], False))

    def _before_forward(self, block: Block) -> Callable[..., None]:
        def bring(module: nn.Module, args: Any) -> None:
            if module is not block.module:
                raise RuntimeError(
                    f"A copy of {block.name}, which is offloaded, cannot compute: copies are not streamed to the "
                    "device. Copy the model before prepare()."
                )
            self.stand_down()
            block.check()
            backward = in_backward()
            if not backward:
                self.on_forward()
            sources = block.sources()
            self.enter(block, backward, sources)
            loan = Loan(block, sources, self.stand_for(block))
            block.install(loan.tensors)
            self._running[block.index] = loan

        return bring

    def _after_forward(self, block: Block) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            loan = self._running.pop(block.index, None)
            if loan is None:  # refused
                return
            block.install(block.params)
            if in_backward():  # what is recomputed inside of the block comes later
                self._stand(loan)
            loan.give_back()
            outputs = leaves(output)
            differentiable = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
            if not differentiable and torch.is_grad_enabled() and not all(isinstance(each, _PLAIN) for each in outputs):
                raise RuntimeError(
                    f"{block.name}, which is offloaded, returned a {type(output).__name__}, in which no tensor was "
                    "found that requires gradients: a backward pass must begin at one. Return tensors, or tuples, "
                    "lists, dictionaries or dataclasses of them."
                )

            def enter(gradient: Tensor) -> None:
                if torch.is_grad_enabled():
                    raise no_double_backward()
                loan.check()
                self.enter(block, True, loan.sources)
                self._stand(loan)

            for tensor in differentiable:
                tensor.register_hook(enter)  # type: ignore[no-untyped-call]
            if in_backward():
                return
            if differentiable:
                self._sources[block.index] = loan.sources
            elif torch.is_grad_enabled():
                self._sources.pop(block.index, None)

        return leave

    def _stand(self, loan: Loan) -> None:
        """Let a block have what it computes with until another backward pass: parts of it may be recomputed."""
        self.stand_down()
        loan.block.install(loan.tensors)
        self._standing = loan

    def stand_down(self) -> None:
        """Give the block of the last backward pass its parameters back."""
        if self._standing is not None:
            self._standing.block.install(self._standing.block.params)
            self._standing = None

    # --- copies -----------------------------------------------------------------------------------------------------

    def enter(self, block: Block, backward: bool, sources: Sources) -> None:
        """Let the current stream compute with a block from now on, and start to bring the next one."""
        use, before = Use(block, backward), self._current
        if use == before and backward and self._holds(block, sources, backward):  # recomputation, or another output
            return
        if not backward and before is not None and (before.backward or before.block.index >= block.index):
            self._restart()
        self._current = use
        if backward:
            self.on_backward()
        self._ahead.take(use)
        if not self._holds(block, sources, backward):
            self._copy(Contents(block, sources, versions_of(block.params)), self._moment())
        self._wait(block)
        following = self._ahead.next_of(use)
        if following is None and backward and block.index - 1 in self._sources:
            following = Use(self.blocks[block.index - 1], True)
        if following is not None and following.backward == backward and following.block.slot != block.slot:
            self._start(following)

    def _holds(self, block: Block, sources: Sources, backward: bool) -> bool:
        held = self._held[block.slot]
        if held is None or held.block is not block or held.sources is not sources:
            return False
        return backward or held.versions == versions_of(block.params)

    def _restart(self) -> None:
        self._ahead.restart()
        self._held = [None, None]
        self._current = None

    def _start(self, use: Use) -> None:
        block = use.block
        sources = self._sources.get(block.index) if use.backward else None
        if sources is None:  # in a forward pass, or the block will be recomputed
            sources = block.sources()
        if self._holds(block, sources, use.backward):
            return
        self._held[block.slot] = None
        contents, after = Contents(block, sources, versions_of(block.params)), self._moment()
        self._ahead.start(use, lambda: self._copy(contents, after), self.device)

    def _moment(self) -> torch.Event | None:
        """Return when the computing stream has done what it was given so far."""
        return None if self._copying is None else torch.accelerator.current_stream(self.device).record_event()

    def _copy(self, contents: Contents, after: torch.Event | None) -> None:
        block, sources = contents.block, contents.sources
        place = self._places[block.slot]
        self.traffic.bytes_in += block.num_bytes
        prefetch_pages(block.weights)
        if self._copying is None or after is None:
            block.copy_to(place, sources)
        else:
            with self._copying:
                self._copying.wait_event(after)
                if block.buffers.on_disk:
                    place[: block.num_bytes].copy_(self._read(block, sources), non_blocking=True)
                else:
                    block.copy_to(place, sources, non_blocking=True)
            self._copied[block.slot] = self._copying.record_event()
        release_pages(block.weights)
        self._held[block.slot] = contents

    def _read(self, block: Block, sources: Sources) -> Tensor:
        """Return the parameters of a block, from the disk, in memory that can be copied beside the host."""
        if block.slot not in self._transfers:
            largest = max(each.num_bytes for each in self.blocks)
            self._transfers[block.slot] = block.buffers.transfer(largest)
        copied = self._copied[block.slot]
        if copied is not None:  # the copy before, which reads the same memory
            copied.synchronize()
        block.copy_to(self._transfers[block.slot], sources)
        return self._transfers[block.slot][: block.num_bytes]

    def _wait(self, block: Block) -> None:
        copied = self._copied[block.slot]
        if copied is not None:
            computing = torch.accelerator.current_stream(self.device)
            with self.traffic.waiting(computing):
                computing.wait_event(copied)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor has been changed in place."""
    return [tensor._version for tensor in tensors]


def in_backward() -> bool:
    """Return whether this thread executes a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
