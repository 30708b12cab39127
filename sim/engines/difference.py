"""Two layouts of one spec compared byte map for byte map: an engine's own and its model's.

Each role of each layer is a map from (slot, element) to a byte. Two are equal exactly when the first byte, the step
from slot to slot and the step along every axis of more than one element are, so these are compared, not the bytes.
Kernel blocks (axis ``page``) that follow each other as tokens do are taken for tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..layout import Buffer, Layout

Key = tuple[str, int, str]
"""Manager, layer and role."""


def differences(one: Layout, other: Layout) -> Iterator[str]:
    """Yield where two layouts put something elsewhere, as sentences; nothing where every byte agrees.

    Pools are taken for one run of bytes each layout, in their order: an engine may cut one allocation into regions that
    the other calls pools. Compared are its bytes, which layers share slot ids, and each role's byte map.
    """
    mine, theirs = (sum(pool.size_bytes for pool in layout.pools) for layout in (one, other))
    if mine != theirs:
        yield f"{mine} B in {one.allocator}, {theirs} B in {other.allocator}"
    held, others = _places(one), _places(other)
    for key in sorted(held.keys() ^ others.keys()):
        owner = one.allocator if key in held else other.allocator
        yield f"layer {key[1]}'s {key[2]} is in {owner} alone"
    for key in sorted(held.keys() & others.keys()):
        if held[key] != others[key]:
            yield (
                f"layer {key[1]}'s {key[2]} is {_words(held[key])} in {one.allocator}, {_words(others[key])} in "
                f"{other.allocator}"
            )
    if _sharers(one) != _sharers(other):
        yield f"layers share slot ids as {_sharers(one)} in {one.allocator}, as {_sharers(other)} in {other.allocator}"


_Place = tuple[int, int, int, str, tuple[tuple[str, int, int], ...]]


def _places(layout: Layout) -> dict[Key, _Place]:
    bases = list(accumulate((pool.size_bytes for pool in layout.pools), initial=0))
    return {(held.manager, held.layer, held.role): _place(held, bases) for held in layout.buffers}


def _place(held: Buffer, bases: Sequence[int]) -> _Place:
    """Return first byte, slots, step from slot to slot, format, and (axis, size, step) of each axis that steps."""
    page = held.page
    axes = zip(page.axes, page.shape, page.stride_bytes, strict=True)
    steps = _joined([(axis, size, stride) for axis, size, stride in axes if size > 1])
    step = held.slot_stride_bytes if held.slot_count > 1 else 0
    return bases[held.pool] + held.offset_bytes, held.slot_count, step, page.format.value, tuple(sorted(steps))


def _joined(steps: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return the axes with kernel blocks (``page``) taken for tokens where they follow each other like tokens."""
    found = {axis: (size, stride) for axis, size, stride in steps}
    if "page" not in found:
        return steps
    count, step = found["page"]
    tokens, stride = found.get("token", (1, step))
    if step != tokens * stride:
        return steps
    del found["page"]
    found["token"] = count * tokens, stride
    return [(axis, size, stride) for axis, (size, stride) in found.items()]


def _words(place: _Place) -> str:
    first, slots, step, kind, axes = place
    inside = ", ".join(f"{size} {axis} by {stride}" for axis, size, stride in axes)
    return f"at byte {first}, {slots} slots by {step} ({kind}: {inside or 'one element'})"


def _sharers(layout: Layout) -> list[list[tuple[int, str]]]:
    cycles: dict[int, list[tuple[int, str]]] = {}
    for held in layout.buffers:
        cycles.setdefault(held.life_cycle, []).append((held.layer, held.role))
    return sorted(sorted(members) for members in cycles.values())
