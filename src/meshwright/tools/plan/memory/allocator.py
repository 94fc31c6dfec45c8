"""Simulate the caching allocator of PyTorch for CUDA devices, by its documented and observable behaviour.

- Sizes are multiples of 512 bytes. Up to 1 MiB they come from small segments of 2 MiB. Larger ones come from segments
  of 20 MiB, or from 10 MiB on from a segment of their own, a multiple of 2 MiB.
- A request takes the smallest free block that is large enough, of equal ones that with the lowest address. The rest of
  the block becomes a block of its own, if it has at least 512 bytes (small) or more than 1 MiB (large).
- A freed block merges with free neighbours in its segment. Segments are kept: reserved memory grows only.
- Each stream has blocks of its own, and a block is reused on its stream only.
- With `expandable_segments:True` each stream has one segment for small and one for large blocks, which grows at its end
  by 2 MiB or 20 MiB pages, and large blocks are split as small ones are.

What it leaves out: the release of cached segments when a device is full, and options that change sizes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from .lifetimes import Integers

MIB = 1 << 20
_UNIT = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
_ADDRESS_BITS = 48
_ADDRESS = (1 << _ADDRESS_BITS) - 1


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment, in use or free."""

    pool: BlockPool
    address: int
    """Position among the addresses of its pool."""
    size: int
    used: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    """Its neighbours in the segment."""


class BlockPool:
    """The small or the large blocks of one stream."""

    __slots__ = ("blocks", "end", "free", "page", "smallest_rest", "tail")

    def __init__(self, small: bool, expandable: bool) -> None:
        self.free: list[int] = []
        """Free blocks as numbers, size before address: the first that is not less than a size fits best."""
        self.blocks: dict[int, MemoryBlock] = {}
        self.smallest_rest = _UNIT if small or expandable else _SMALL + 1
        self.page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        self.tail: MemoryBlock | None = None
        """The block at the end of an expandable segment."""
        self.end = 0

    def take(self, size: int) -> MemoryBlock | None:
        """Remove and return the free block that fits best."""
        at = bisect_left(self.free, size << _ADDRESS_BITS)
        return self.blocks.pop(self.free.pop(at) & _ADDRESS) if at < len(self.free) else None

    def give(self, block: MemoryBlock) -> None:
        """Add a free block."""
        insort(self.free, block.size << _ADDRESS_BITS | block.address)
        self.blocks[block.address] = block

    def remove(self, block: MemoryBlock) -> None:
        """Remove a free block that becomes part of another."""
        del self.free[bisect_left(self.free, block.size << _ADDRESS_BITS | block.address)]
        del self.blocks[block.address]


class Allocator:
    """The allocator of one device."""

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved = 0
        self.allocated = 0
        """Bytes of the blocks in use, as `torch.cuda.memory_allocated` counts them."""
        self._pools: dict[tuple[str, bool], BlockPool] = {}

    def allocate(self, size: int, stream: str) -> MemoryBlock:
        """Return a block in use."""
        size = max(_UNIT, -(-size // _UNIT) * _UNIT)
        small = size <= _SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = BlockPool(small, self.expandable)
        block = pool.take(size) or (
            self._grown(pool, size) if self.expandable else self._new_segment(pool, size, small)
        )
        if block.size - size >= pool.smallest_rest:
            self._split(block, size)
        block.used = True
        self.allocated += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        """Make a block free again, and merge it with its free neighbours."""
        pool = block.pool
        self.allocated -= block.size
        block.used = False
        after, before = block.after, block.before
        if after is not None and not after.used:
            pool.remove(after)
            _join(block, after)
        if before is not None and not before.used:
            pool.remove(before)
            _join(before, block)
            block = before
        pool.give(block)

    def _split(self, block: MemoryBlock, size: int) -> None:
        pool = block.pool
        rest = MemoryBlock(pool, block.address + size, block.size - size, False, block, block.after)
        if block.after is not None:
            block.after.before = rest
        elif pool.tail is block:
            pool.tail = rest
        block.after = rest
        block.size = size
        pool.give(rest)

    def _new_segment(self, pool: BlockPool, size: int, small: bool) -> MemoryBlock:
        shared = small or size < _OWN_SEGMENT
        length = pool.page if shared else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self.reserved += length
        block = MemoryBlock(pool, pool.end, length)
        pool.end += length
        return block

    def _grown(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Extend the segment, so that its last block, if free, or a new one has the size."""
        tail = pool.tail
        begun = tail if tail is not None and not tail.used else None
        missing = size - (begun.size if begun is not None else 0)
        length = -(-missing // pool.page) * pool.page
        self.reserved += length
        if begun is not None:
            pool.remove(begun)
            begun.size += length
            block = begun
        else:
            block = MemoryBlock(pool, pool.end, length, False, tail)
            if tail is not None:
                tail.after = block
            pool.tail = block
        pool.end += length
        return block


def _join(block: MemoryBlock, after: MemoryBlock) -> None:
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block
    elif block.pool.tail is after:
        block.pool.tail = block


@dataclass
class Simulation:
    """What the allocator did."""

    reserved: int
    """The peak of reserved memory."""
    allocated: int
    """The peak of memory in blocks that were in use."""
    growth: list[tuple[int, int]]
    """Reserved bytes from an event on, where they grew."""

    @property
    def fragmentation(self) -> float:
        """Reserved bytes that no peak used, as a share."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


def simulate(order: Integers, sizes: Integers, streams: Sequence[str], expandable: bool = False) -> Simulation:
    """Replay births and ends of allocations, in the form of `sweep.events_in_order`."""
    allocator = Allocator(expandable)
    bytes_of = sizes.tolist()
    blocks: dict[int, MemoryBlock] = {}
    growth: list[tuple[int, int]] = []
    peak = reserved = 0
    for event, index in enumerate(order.tolist()):
        if index >= 0:
            if bytes_of[index]:
                blocks[index] = allocator.allocate(bytes_of[index], streams[index])
                peak = max(peak, allocator.allocated)
                if allocator.reserved != reserved:
                    reserved = allocator.reserved
                    growth.append((event, reserved))
        elif (block := blocks.pop(-1 - index, None)) is not None:
            allocator.free(block)
    return Simulation(reserved, peak, growth)
