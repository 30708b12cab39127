"""``raw_layouts``: sound ones have no byte with two owners, unsound ones always have, by painting every byte."""

from __future__ import annotations

import itertools

from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.strategies import raw_layouts


def rules_broken(layout: Layout) -> set[str]:
    return {finding.rule for finding in check(layout)}


def has_one_owner_per_byte(layout: Layout) -> bool:
    """Paint every cell of every buffer, byte by byte; cells of one group may share bytes at equal slot ids alone."""
    owners: dict[tuple[int, int], list[tuple[int, int, tuple[str, int]]]] = {}
    for buffer in layout.buffers:
        cycle = layout.life_cycles[buffer.life_cycle]
        group = cycle.manager, cycle.group
        for slot, *index in itertools.product(range(buffer.slot_count), *map(range, buffer.page.shape)):
            first = buffer.offset_bytes + slot * buffer.slot_stride_bytes
            first += sum(digit * stride for digit, stride in zip(index, buffer.page.stride_bytes, strict=True))
            for byte in range(first, first + buffer.page.format.container_bytes):
                if not 0 <= byte < layout.pools[buffer.pool].size_bytes:
                    return False
                others = owners.setdefault((buffer.pool, byte), [])
                for other_slot, other_cycle, other_group in others:
                    overlaid = other_group == group and other_cycle != buffer.life_cycle and other_slot == slot
                    if not overlaid:
                        return False
                others.append((slot, buffer.life_cycle, group))
    return True


def test_sound_layouts_are_sound(examples):
    for layout in examples(raw_layouts(sound=True), 90):
        assert has_one_owner_per_byte(layout)
        assert not rules_broken(layout), "nor does any other rule see a fault"


def test_unsound_layouts_never_are(examples):
    for layout in examples(raw_layouts(sound=False), 90):
        assert not has_one_owner_per_byte(layout)
        assert rules_broken(layout) & {"alias", "bounds"}


def test_both_are_drawn_when_neither_is_asked_for(examples):
    drawn = [has_one_owner_per_byte(layout) for layout in examples(raw_layouts(), 100)]
    assert 20 < sum(drawn) < 80


def test_all_kinds_of_layouts_are_drawn(examples):
    layouts = examples(raw_layouts(sound=True), 90)
    buffers = [(layout, buffer) for layout in layouts for buffer in layout.buffers]
    assert any(len(layout.pools) > 1 for layout in layouts)
    assert any(not buffer.page.dense for _, buffer in buffers), "scattered over the slot"
    strides = [(layout.pools[buffer.pool], buffer) for layout, buffer in buffers if buffer.slot_count > 1]
    assert any(buffer.slot_stride_bytes == buffer.page.span_bytes < pool.slot_bytes for pool, buffer in strides)
    assert any(buffer.slot_stride_bytes < buffer.page.span_bytes for _, buffer in strides), "slots inside an axis"
    assert any(pool.padding_bytes for layout in layouts for pool in layout.pools)
    groups = [[cycle.group for cycle in layout.life_cycles] for layout in layouts]
    assert any(len(set(own)) < len(own) for own in groups), "two life cycles overlaid in one group"


def test_bounds_of_a_layout_are_the_callers(examples):
    for layout in examples(raw_layouts(sound=True, max_pools=1, max_slots=2, max_buffers=1, max_extent=2), 80):
        assert len(layout.pools) == 1
        for buffer in layout.buffers:
            assert buffer.slot_count <= 2
            assert max(buffer.page.shape) <= 2


def test_an_overlap_shrinks_to_one_byte_with_two_owners(minimum):
    layout = minimum(raw_layouts(sound=False), lambda layout: "alias" in rules_broken(layout))
    assert len(layout.pools) == 1
    assert [(buffer.offset_bytes, buffer.page.span_bytes, buffer.slot_count) for buffer in layout.buffers] == [
        (0, 1, 1)
    ] * 2


def test_a_buffer_takes_its_own_bytes_of_a_slot(examples):
    """Not the span of its page, inside which other pages may lie: interleaved pages must not fill a slot twice."""
    layouts = examples(raw_layouts(sound=True), 90)
    scattered = [buffer for layout in layouts for buffer in layout.buffers if not buffer.page.dense]
    assert scattered
    for buffer in scattered:
        elements = set(itertools.product(*map(range, buffer.page.shape)))
        assert buffer.page_bytes == len(elements) * buffer.page.format.container_bytes
