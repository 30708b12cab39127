"""Strides that interlock in no simple way: decided exactly where the views are bounded, else refused in one line."""

from __future__ import annotations

import importlib
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvsan.ci.campaign import Options, run_campaign
from kvsan.cli.examination import NamedAllocator, examine
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.spec import AttentionLayer, CacheSpec
from kvsan.sim.checking import check
from kvsan.sim.layout import Access, Buffer, Layout, LifeCycle, Pool
from kvsan.sim.overlap import (
    SlotView,
    Undecided,
    bitmaps,
    sets,
    smallest_collision,
    trace_collision,
    trace_self_collision,
)
from kvsan.sim.overlap.equation import SearchTooLong
from kvsan.sim.page import Page, strided_page

AXES = tuple(f"axis{number}" for number in range(8))


def tangled(
    rng: random.Random, axes: int, extent: int, counts: tuple[int, int] = (2, 5)
) -> tuple[tuple[int, int], ...]:
    """Return axes whose strides have nothing in common, over about ``extent`` bytes."""
    return tuple((rng.randint(*counts), rng.randrange(1, extent // axes // counts[1]) | 1) for _ in range(axes))


def painted(view: SlotView, length: int) -> np.ndarray:
    """Return how many elements hold each byte, by painting one axis after the other."""
    times = np.zeros(length, dtype=np.int64)
    times[view.offset_bytes : view.offset_bytes + view.item_bytes] = 1
    for count, stride in (*view.axes, (view.slot_count, view.slot_stride_bytes)):
        times = sum(
            np.concatenate([np.zeros(i * stride, np.int64), times[: length - i * stride]]) for i in range(count)
        )
    return times


@pytest.mark.parametrize("seed", range(6))
def test_tangled_views_are_decided_exactly_and_soon(seed: int) -> None:
    """Seven axes over a mebibyte: the search gives up on most of them, and the integer set library took minutes."""
    rng = random.Random(seed)
    methods: set[str] = set()
    for _ in range(4):
        length = 1 << 21
        one, other = (
            SlotView(rng.randrange(1000), rng.randint(1, 4), rng.randrange(1000), tangled(rng, 7, 1 << 20), 1)
            for _ in range(2)
        )
        started = time.process_time()
        found, how = trace_collision(one, other)
        own, how_own = trace_self_collision(one)
        assert time.process_time() - started < 2
        methods |= how | how_own
        left, right = painted(one, length), painted(other, length)
        for collision, shared in ((found, (left > 0) & (right > 0)), (own, left > 1)):
            assert (None if collision is None else collision.byte) == (int(shared.argmax()) if shared.any() else None)
    assert "bitmap" in methods
    assert "sets" not in methods


def tangled_layout(extent: int) -> Layout:
    """Return two buffers of tangled pages over one pool."""
    rng = random.Random(7)
    pages: list[Page] = []
    for _ in range(2):
        shape, strides = zip(*tangled(rng, 7, extent, (7, 9)), strict=True)
        pages.append(strided_page(ElementFormat.UINT8, AXES[:7], shape, strides))
    size = max(page.span_bytes for page in pages)
    buffers = [
        Buffer("target", 0, role, 0, 0, 0, size, 2, 8**7, page)
        for role, page in zip(("key", "value"), pages, strict=True)
    ]
    return Layout(
        allocator="tangled",
        pools=(Pool("target", 0, 0, 2, size, 2 * size),),
        life_cycles=(LifeCycle("target", 0),),
        buffers=tuple(buffers),
        accesses=(Access("reader", 0, 0, 1, size, 2, pages[0]),),
    )


def test_the_rules_decide_a_tangled_layout() -> None:
    layout = tangled_layout(1 << 22)
    started = time.process_time()
    assert "alias" in {finding.rule for finding in check(layout)}
    assert time.process_time() - started < 10


OWN = """
layout = None


def allocate(spec):
    return layout
"""


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the views of ``tangled_layout`` be too long for bitmaps, and the integer set library give up at once."""
    monkeypatch.setattr(bitmaps, "EXTENT_LIMIT", 1 << 16)
    monkeypatch.setattr(sets, "OPERATION_LIMIT", 100)


@pytest.mark.usefixtures("low_limits")
def test_what_is_beyond_the_limits_is_no_answer() -> None:
    rng = random.Random(7)
    one, other = (SlotView(0, 1, 0, tangled(rng, 7, 1 << 30, (2, 5)), 1) for _ in range(2))
    with pytest.raises(Undecided, match="simplify the strides of the views") as caught:
        smallest_collision(msgspec.structs.replace(one, offset_bytes=1), other)
    assert isinstance(caught.value.__context__, SearchTooLong)


@pytest.mark.usefixtures("low_limits")
def test_a_layout_beyond_the_limits_is_bad_input_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever calls ``check``, on the command line, and in a campaign, which saves the spec."""
    layout = tangled_layout(1 << 22)
    with pytest.raises(SpecError) as caught:
        check(layout)
    text = str(caught.value)
    assert text.startswith("layout: alias cannot be decided: layer 0's key and ")
    assert text.endswith("simplify the strides of the views")
    assert "\n" not in text
    named = NamedAllocator("own:allocate", lambda spec: layout, False)
    with pytest.raises(SpecError, match=r"^--allocator: own:allocate: layout: alias cannot be decided"):
        examine(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),)), named)
    (tmp_path / "tangled_allocator.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.import_module("tangled_allocator"), "layout", layout)
    with pytest.raises(SpecError, match=r"alias cannot be decided.* on the spec of "):
        run_campaign(Options(allocator="tangled_allocator:allocate", examples=5, cases=tmp_path / "cases"))
    assert len(list((tmp_path / "cases").iterdir())) == 1
