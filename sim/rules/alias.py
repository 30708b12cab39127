"""Rule ``alias``: no two cells that may be live at the same time share a byte.

A cell is one slot's page of one buffer. Within a life cycle every slot may be live at once. Life cycles of one group
take their slot ids from
one allocator, so their cells may share bytes at equal ids and only there. Cells of different groups are independent.

The common layouts need no pairwise work. Where all views of a pool step by the same pitch and stay inside it, slot
``s`` of every view lies in
``[s * pitch, (s + 1) * pitch)``: cells of different slots cannot meet, and inside a slot the sorted byte ranges of a
life cycle must not
overlap (one pass). Everything else is decided pair by pair, exactly, after pruning pairs whose byte ranges (or whose
ranges
modulo a common pitch) do not meet.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from ..finding import Finding
from ..layout import Access, Buffer, Layout
from ..overlap import Collision, SlotView, Undecided, smallest_collision, smallest_self_collision
from ..page import Page
from .rule import Inspection, Rule, access_name, buffer_name, place_of, pool_name

Range: TypeAlias = "tuple[int, int, Piece]"
"""First byte, length in bytes, and whose they are."""

MAX_STRAYS = 64
"""Accesses off their own buffer whose victims are looked for; op-address reports them all."""


class Piece(msgspec.Struct, frozen=True):
    """What is stored together: a buffer (``part`` -1), or one plane of a packed buffer."""

    buffer: int
    part: int
    offset_bytes: int
    page: Page


def check_alias(inspection: Inspection) -> Iterator[Finding]:
    """Yield pieces of a pool that meet while live, that overlap themselves, and strays that meet others' bytes."""
    layout = inspection.layout
    pools = [_pieces(layout, members) for members in inspection.by_pool]
    proven: set[object] = set()  # what one layer was found free of holds for layers like it
    for pieces in pools:
        for piece in pieces:
            stride, count = layout.buffers[piece.buffer].slot_stride_bytes, layout.buffers[piece.buffer].slot_count
            if not (piece.page.dense and (stride >= piece.page.span_bytes or count == 1)):
                yield from _found_anew(proven, (piece.page, stride, count), _self_overlap(inspection, piece))
        if len(pieces) > 1:
            for first, second in _candidates(layout, pieces):
                like = _likeness(layout, first, second)
                yield from _found_anew(proven, like, _pair(inspection, first, second))
    for access in inspection.strays[:MAX_STRAYS]:
        yield from _stray(inspection, access, pools[access.pool])


def _found_anew(proven: set[object], like: object, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield ``findings``, unless what is ``like`` it has been proven to have none; take down what has none."""
    if like in proven:
        return
    clean = True
    for finding in findings:
        clean = False
        yield finding
    if clean:
        proven.add(like)


def _likeness(layout: Layout, first: Piece, second: Piece) -> tuple[object, ...]:
    """Return all that decides whether two pieces meet: their cells, their steps, and how far apart they start."""
    one, other = layout.buffers[first.buffer], layout.buffers[second.buffer]
    apart = second.offset_bytes - first.offset_bytes
    steps = one.slot_stride_bytes, one.slot_count, other.slot_stride_bytes, other.slot_count
    return first.page, second.page, steps, apart, _overlay(layout, one, other)


def _pieces(layout: Layout, members: list[int]) -> list[Piece]:
    """Return what a pool's buffers store: the planes of a packed buffer one by one, its gaps belonging to nobody."""
    pieces = []
    for index in members:
        buffer = layout.buffers[index]
        if not buffer.parts:
            pieces.append(Piece(index, -1, buffer.offset_bytes, buffer.page))
        for number, part in enumerate(buffer.parts):
            pieces.append(Piece(index, number, buffer.offset_bytes + part.offset_bytes, part.page))
    return pieces


def view_of(offset_bytes: int, count: int, pitch_bytes: int, page: Page) -> SlotView:
    """Return a page repeated over slots as the byte set that the overlap solver takes."""
    if page.dense:
        return SlotView(offset_bytes, count, pitch_bytes, (), page.span_bytes)
    axes = tuple(zip(page.shape, page.stride_bytes, strict=True))
    return SlotView(offset_bytes, count, pitch_bytes, axes, page.format.container_bytes)


def _piece_view(layout: Layout, piece: Piece) -> SlotView:
    """Return all cells of a piece as a byte set."""
    buffer = layout.buffers[piece.buffer]
    return view_of(piece.offset_bytes, buffer.slot_count, buffer.slot_stride_bytes, piece.page)


def _candidates(layout: Layout, pieces: list[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Yield the pairs of a pool's pieces that may share bytes while live; every other pair is proven apart."""
    buffers = layout.buffers
    pitch = buffers[pieces[0].buffer].slot_stride_bytes
    uniform = all(buffers[piece.buffer].slot_stride_bytes == pitch for piece in pieces)
    if not uniform or not all(
        piece.offset_bytes >= 0 and piece.offset_bytes + piece.page.span_bytes <= pitch for piece in pieces
    ):
        yield from _ranges_that_meet(layout, pieces, pitch if uniform and pitch > 0 else 0)
        return
    cycles: dict[int, list[Range]] = {}
    for piece in pieces:
        inside = (piece.offset_bytes, piece.page.span_bytes, piece)
        cycles.setdefault(buffers[piece.buffer].life_cycle, []).append(inside)
    groups = {(layout.life_cycles[cycle].manager, layout.life_cycles[cycle].group) for cycle in cycles}
    if len(groups) > 1:
        yield from _sweep([inside for own in cycles.values() for inside in own])
        return
    for own in cycles.values():
        yield from _sweep(own)


def _ranges_that_meet(layout: Layout, pieces: list[Piece], pitch: int) -> Iterator[tuple[Piece, Piece]]:
    """Yield pairs whose byte ranges meet.

    Pieces are first split where their whole ranges leave a gap (a layer-major pool falls apart into its layers). Inside
    such a cluster ranges are taken modulo ``pitch`` where all views share one and no page is longer than it.
    """
    ranges: list[Range] = []
    for piece in pieces:
        buffer = layout.buffers[piece.buffer]
        far = max(0, buffer.slot_count - 1) * buffer.slot_stride_bytes
        ranges.append((piece.offset_bytes + min(0, far), abs(far) + piece.page.span_bytes, piece))
    seen = set()
    for cluster in _clusters(ranges):
        if pitch and all(piece.page.span_bytes <= pitch for _, _, piece in cluster):
            cluster = _modulo(cluster, pitch)
        for first, second in _sweep(cluster):
            if pitch and _apart_in_other_slots(layout, first, second, pitch):
                continue
            pair = frozenset(((first.buffer, first.part), (second.buffer, second.part)))
            if len(pair) == 2 and pair not in seen:
                seen.add(pair)
                yield first, second


def _clusters(ranges: list[Range]) -> Iterator[list[Range]]:
    """Yield the ranges in groups that do not touch each other."""
    ranges.sort(key=_start)
    cluster: list[Range] = []
    end = 0
    for inside in ranges:
        if cluster and inside[0] >= end:
            yield cluster
            cluster = []
        end = inside[0] + inside[1] if not cluster else max(end, inside[0] + inside[1])
        cluster.append(inside)
    if cluster:
        yield cluster


def _modulo(cluster: list[Range], pitch: int) -> list[Range]:
    """Return the first cells' ranges modulo ``pitch``, cut in two where they wrap around."""
    ranges: list[Range] = []
    for _, _, piece in cluster:
        start, span = piece.offset_bytes % pitch, piece.page.span_bytes
        ranges.append((start, min(span, pitch - start), piece))
        if start + span > pitch:
            ranges.append((0, start + span - pitch, piece))
    return ranges


def _sweep(ranges: list[Range]) -> Iterator[tuple[Piece, Piece]]:
    """Yield the pairs of pieces whose (start, length) ranges overlap, by one pass in order of start."""
    ranges.sort(key=_start)
    live: list[tuple[int, Piece]] = []
    highest = -1
    for start, length, piece in ranges:
        if start < highest:
            live = [(end, other) for end, other in live if end > start]
            for _, other in live:
                yield other, piece
        else:
            live = []
        end = start + length
        highest = end if not live else max(highest, end)
        live.append((end, piece))


def _start(inside: Range) -> int:
    return inside[0]


def _overlay(layout: Layout, one: Buffer, other: Buffer) -> bool:
    """Whether two buffers share slot ids without being live together: life cycles of one group, at equal ids."""
    if one.life_cycle == other.life_cycle:
        return False
    mine, theirs = layout.life_cycles[one.life_cycle], layout.life_cycles[other.life_cycle]
    return (mine.manager, mine.group) == (theirs.manager, theirs.group)


def _apart_in_other_slots(layout: Layout, first: Piece, second: Piece, pitch: int) -> bool:
    """Whether two pieces that share slot ids without being live together lie in one window of ``pitch`` bytes.

    Then cells of different slots lie in different windows, and those of one id are never live together.
    """
    start = min(first.offset_bytes, second.offset_bytes)
    end = max(first.offset_bytes + first.page.span_bytes, second.offset_bytes + second.page.span_bytes)
    return end - start <= pitch and _overlay(layout, layout.buffers[first.buffer], layout.buffers[second.buffer])


def _name(layout: Layout, piece: Piece) -> str:
    buffer = layout.buffers[piece.buffer]
    if piece.part < 0:
        return buffer_name(buffer)
    part = buffer.parts[piece.part]
    return f"layer {part.layer}'s {part.role} (packed)"


def _both(layout: Layout, first: Piece, second: Piece) -> str:
    return f"{_name(layout, first)} and {_name(layout, second)}"


def _reached(layout: Layout, access: Access, piece: Piece) -> str:
    return f"the {access_name(layout, access)} and {_name(layout, piece)}"


@contextlib.contextmanager
def _named(pair: Callable[[], str]) -> Iterator[None]:
    """Say of which ``pair`` it is that the solver gives up."""
    try:
        yield
    except Undecided as error:
        raise Undecided(f"{pair()}: {error}") from None


def _pair(inspection: Inspection, first: Piece, second: Piece) -> Iterator[Finding]:
    layout = inspection.layout
    one, other = layout.buffers[first.buffer], layout.buffers[second.buffer]
    with _named(functools.partial(_both, layout, first, second)):
        found = smallest_collision(
            _piece_view(layout, first), _piece_view(layout, second), distinct_slots=_overlay(layout, one, other)
        )
    if found is None:
        return
    yield Finding(
        rule="alias",
        message=f"{_name(layout, first)} (slot {found.slot_a}) and {_name(layout, second)} (slot {found.slot_b}) share "
        f"byte {found.byte} of {pool_name(layout.pools[one.pool])}, and both may be live",
        remedy="give every role of every layer bytes of its own in the slot",
        where=(
            place_of(layout, first.buffer, slot=found.slot_a, byte=found.byte),
            place_of(layout, second.buffer, slot=found.slot_b, byte=found.byte),
        ),
    )


def _self_overlap(inspection: Inspection, piece: Piece) -> Iterator[Finding]:
    """Yield two elements of one piece that share a byte; a declared overlap is inside a cell, never between slots."""
    layout = inspection.layout
    view = _piece_view(layout, piece)
    with _named(lambda: f"{_name(layout, piece)} and itself"):
        if piece.page.self_overlap:
            found = smallest_collision(view, view, distinct_slots=True)
        else:
            found = smallest_self_collision(view)
    if found is None:
        return
    pool = pool_name(layout.pools[layout.buffers[piece.buffer].pool])
    yield Finding(
        rule="alias",
        message=f"{_name(layout, piece)} overlaps itself: {_cell(found.slot_a, found.index_a)} and "
        f"{_cell(found.slot_b, found.index_b)} share byte {found.byte} of {pool}",
        remedy="step by at least one page per slot, or declare the overlap when it is meant",
        where=(place_of(layout, piece.buffer, slot=found.slot_a, byte=found.byte),),
    )


def _cell(slot: int, index: tuple[int, ...]) -> str:
    return f"slot {slot}" + (f" element {index}" if index else "")


def _stray(inspection: Inspection, access: Access, pieces: list[Piece]) -> Iterator[Finding]:
    """Yield the first piece that a stray access meets at slots that may be live together.

    Its own piece counts at other slots; where the access stands for every other slot only, those are left to
    ``op-address``.
    """
    layout = inspection.layout
    view = view_of(access.offset_bytes, access.cell_count, access.pitch_bytes, access.page)
    every_slot = access.first_slot == 0 and access.slot_step == 1
    for piece in pieces:
        mine = (piece.buffer, piece.part) == (access.buffer, access.part)
        distinct = mine or _overlay(layout, layout.buffers[access.buffer], layout.buffers[piece.buffer])
        if distinct and not every_slot:
            continue
        with _named(functools.partial(_reached, layout, access, piece)):
            found = smallest_collision(view, _piece_view(layout, piece), distinct_slots=distinct)
        if found is not None:
            yield _stray_finding(layout, access, piece, found)
            return


def _stray_finding(layout: Layout, access: Access, victim: Piece, found: Collision) -> Finding:
    slot = access.first_slot + found.slot_a * access.slot_step
    return Finding(
        rule="alias",
        message=f"the {access_name(layout, access)} in slot {slot} reaches byte {found.byte} of "
        f"{pool_name(layout.pools[access.pool])}, which belongs to {_name(layout, victim)} in slot {found.slot_b}",
        remedy="derive the pointer, mapping offset and pages per slot from the storage that was really built",
        where=(
            place_of(layout, access.buffer, slot=slot, byte=found.byte, consumer=access.consumer),
            place_of(layout, victim.buffer, slot=found.slot_b, byte=found.byte),
        ),
    )


RULE = Rule(
    "alias",
    "no two cells that may be live at the same time share a byte",
    "Two roles, layers or slots that share a byte overwrite each other. All slots of a life cycle may be live at "
    "once; life cycles of one group may share bytes at equal slot ids only, since an id is held by one of them at a "
    "time; states and pages of different groups are independent, each with its own slot count. What a consumer's "
    "formula reaches counts as cells of the role it believes it reads. Decided exactly for all slots; the finding "
    "names the smallest shared byte.",
    check_alias,
)
