"""The simulated caching allocator: sequences worked by hand, and laws that hold for all of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from meshwright.tools.plan.memory.allocator import MIB, Allocator, MemoryBlock, simulate

KIB = 1024


def test_a_byte_takes_512_of_a_small_segment() -> None:
    allocator = Allocator()
    block = allocator.allocate(1, "main")
    assert (block.size, allocator.allocated, allocator.reserved) == (512, 512, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (MIB, 2 * MIB),  # the largest small one
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from here on a segment of its own
        (10 * MIB + 1, 12 * MIB),
        (131 * MIB, 132 * MIB),
    ],
)
def test_the_segment_depends_on_the_size(size: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.allocate(size, "main")
    assert allocator.reserved == reserved


def test_small_blocks_share_a_segment() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(600 * KIB, "main") for _ in range(3)]
    assert allocator.reserved == 2 * MIB
    allocator.allocate(600 * KIB, "main")
    assert allocator.reserved == 4 * MIB
    assert [block.address for block in blocks] == [0, 600 * KIB, 1200 * KIB]


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    large, small = allocator.allocate(64 * MIB, "main"), allocator.allocate(32 * MIB, "main")
    address = small.address
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(30 * MIB, "main").address == address


def test_a_rest_of_at_most_a_mebibyte_stays_with_a_large_block() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(32 * MIB, "main"))
    assert allocator.allocate(31 * MIB, "main").size == 32 * MIB
    other = Allocator()
    other.free(other.allocate(32 * MIB, "main"))
    assert other.allocate(31 * MIB - 512, "main").size == 31 * MIB - 512


def test_a_large_block_in_pieces_no_longer_serves_a_large_request() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(64 * MIB, "main"))
    kept = allocator.allocate(12 * MIB, "main")  # it splits the 64 MiB, and 52 remain
    allocator.allocate(64 * MIB, "main")
    assert allocator.reserved == 128 * MIB
    allocator.free(kept)
    allocator.allocate(64 * MIB, "main")  # together again
    assert allocator.reserved == 128 * MIB


def test_segments_do_not_merge_with_each_other() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(32 * MIB, "main") for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(64 * MIB, "main")
    assert allocator.reserved == 128 * MIB


def test_expandable_segments_do() -> None:
    allocator = Allocator(expandable=True)
    blocks = [allocator.allocate(30 * MIB, "main") for _ in range(2)]
    assert allocator.reserved == 60 * MIB  # 40, and then 20 are mapped: a page is 20 MiB, and 10 were left
    for block in blocks:
        allocator.free(block)
    allocator.allocate(64 * MIB, "main")
    assert allocator.reserved == 80 * MIB


def test_a_stream_does_not_reuse_the_block_of_another() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(32 * MIB, "gathers"))
    allocator.allocate(32 * MIB, "main")
    assert allocator.reserved == 64 * MIB
    allocator.allocate(32 * MIB, "gathers")
    assert allocator.reserved == 64 * MIB


def test_a_simulation_tells_peaks_and_where_it_grew() -> None:
    sizes = np.array([32 * MIB, 32 * MIB, 64 * MIB])
    result = simulate(np.array([0, 1, -1, -2, 2]), sizes, ["main"] * 3)
    assert (result.reserved, result.allocated) == (128 * MIB, 64 * MIB)
    assert result.growth == [(0, 32 * MIB), (1, 64 * MIB), (4, 128 * MIB)]
    assert result.fragmentation == 0.5


def test_nothing_is_taken_for_an_empty_tensor() -> None:
    assert simulate(np.array([0, -1]), np.array([0]), ["main"]).reserved == 0


requests = st.lists(
    st.tuples(
        st.one_of(
            st.integers(1, 2048),
            st.integers(MIB - 600, MIB + 600),
            st.integers(9 * MIB, 11 * MIB),
            st.integers(1, 90 * MIB),
        ),
        st.sampled_from(["main", "gathers"]),
        st.integers(0, 30),
    ),
    max_size=60,
)


@pytest.mark.parametrize("expandable", [False, True])
@given(requests)
@settings(max_examples=150)
def test_laws_of_any_sequence(expandable: bool, wanted: list[tuple[int, str, int]]) -> None:
    allocator = Allocator(expandable)
    live: list[tuple[MemoryBlock, int, str]] = []
    for size, stream, victim in wanted:
        live.append((allocator.allocate(size, stream), size, stream))
        if victim < len(live):
            allocator.free(live.pop(victim)[0])
        check(allocator, live)
    for block, _, _ in live:
        allocator.free(block)
    assert allocator.allocated == 0
    pools = {id(pool): pool for pool in allocator._pools.values()}
    assert sum(block.size for pool in pools.values() for block in pool.blocks.values()) == allocator.reserved
    for pool in pools.values():  # everything merged back to whole segments
        assert all(block.before is None and block.after is None for block in pool.blocks.values())
        assert not expandable or len(pool.blocks) <= 1


def check(allocator: Allocator, live: list[tuple[MemoryBlock, int, str]]) -> None:
    assert allocator.allocated == sum(block.size for block, _, _ in live) <= allocator.reserved
    for block, size, _ in live:
        assert size <= block.size <= size + MIB + 512
    for stream in ("main", "gathers"):
        for pool in {id(block.pool): block.pool for block, _, used in live if used == stream}.values():
            spans = sorted((b.address, b.address + b.size) for b, _, _ in live if b.pool is pool)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
            assert len({used for b, _, used in live if b.pool is pool}) == 1
