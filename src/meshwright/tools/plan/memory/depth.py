"""Compute the memory of a deep model from traces with few of its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ..trace import OWNERS
from .allocator import MIB
from .peak import Memory, Moment, Peak, Share, Timeline

_LARGE_BLOCK = 64 * MIB


def extrapolated(a: Memory, b: Memory, blocks: int) -> Memory:
    """Return the memory with so many blocks, from that with fewer (`a`) and with more (`b`) of them."""
    if b.blocks <= a.blocks:
        raise ValueError(f"the second memory must have more blocks than the first, not {b.blocks} and {a.blocks}.")
    factor = (blocks - a.blocks) / (b.blocks - a.blocks)
    most = along(a.most, b.most, factor)
    places = {place: _peak(a, b, place, factor) for place in b.places}
    total = max(peak.total for peak in places.values())
    # Segments come in steps of 2 and 20 MiB, which a line would multiply if blocks are small: keep the share then.
    grows = (b.total - a.total) / (b.blocks - a.blocks) > _LARGE_BLOCK

    def held(small: float, large: float) -> float:
        by_share = total * _mean(small / a.total, large / b.total)
        return max(total, value(small, large, factor)) if grows else by_share

    allocated, reserved = held(a.allocated, b.allocated), held(a.reserved, b.reserved)
    expandable = held(a.expandable, b.expandable)
    return Memory(
        places=places,
        most=most,
        allocated=allocated,
        reserved=reserved,
        expandable=expandable,
        timeline=_timeline(b, most, reserved),
        blocks=blocks,
        shape_of=b.blocks,
    )


def value(a: float, b: float, factor: float) -> float:
    """Return the point of a line, by its points at 0 and at 1; no memory is negative."""
    return max(0.0, a + factor * (b - a))


def _mean(a: float, b: float) -> float:
    return (a + b) / 2


def along(a: Mapping[str, float], b: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the point of several lines."""
    return {key: value(a.get(key, 0.0), b.get(key, 0.0), factor) for key in dict.fromkeys((*a, *b))}


def _peak(a: Memory, b: Memory, place: str, factor: float) -> Peak:
    later = b.places[place]
    earlier = a.places.get(place)
    if earlier is None:
        # A place that the smaller model lacks, such as a block between the first and the last, grows as its phase does.
        phase = place.partition(" ")[0]
        common = [name for name in b.places if name in a.places and name.partition(" ")[0] == phase]
        if not common:
            return later
        reference = max(common, key=lambda name: b.places[name].total)
        growth = {
            owner: (factor - 1) * (b.places[reference].bytes[owner] - a.places[reference].bytes[owner])
            for owner in OWNERS
        }
        bytes_of = {owner: max(0.0, later.bytes[owner] + growth[owner]) for owner in OWNERS}
        return Peak(bytes_of, later.moment, later.largest)
    shares = {(share.module, share.owner): share for share in earlier.largest}
    largest = []
    for share in later.largest:
        other = shares.get((share.module, share.owner), share)
        bytes_of_share = value(other.bytes, share.bytes, factor)
        largest.append(Share(share.module, share.owner, bytes_of_share, value(other.count, share.count, factor)))
    largest.sort(key=lambda share: -share.bytes)
    return Peak(along(earlier.bytes, later.bytes, factor), Moment(**vars(later.moment)), largest)


def _timeline(b: Memory, most: Mapping[str, float], reserved: float) -> Timeline:
    """Stretch the picture of the larger trace, each owner to its new maximum."""
    line = b.timeline
    stretched = {
        owner: [size * most[owner] / b.most[owner] if b.most[owner] else 0.0 for size in sizes]
        for owner, sizes in line.bytes.items()
    }
    held = [size * reserved / b.reserved if b.reserved else 0.0 for size in line.reserved]
    return Timeline(list(line.at), stretched, held, list(line.passes))
