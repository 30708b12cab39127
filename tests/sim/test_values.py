"""Values of the wrong type in a layout: refused in one line that names the field, whatever field it is."""

from __future__ import annotations

import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.loading import load
from kvsan.model.spec import AttentionLayer, CacheSpec
from kvsan.sim.checking import check
from kvsan.sim.layout import Buffer, HeadMap, Layout
from kvsan.sim.page import Page
from kvsan.sim.registry import ALLOCATORS, allocate
from kvsan.sim.rejection import Rejected
from kvsan.sim.values import MAX_WHOLE, check_values

WRONG: dict[Any, tuple[Any, ...]] = {
    int: (1.0, "1", None, True, np.int64(1), 1 << 127, -(10**5000), (), float("nan")),
    str: (3, None, b"key", "\ud800", "x" * 5000, ("key",)),
    bool: (0, 1, None, "yes"),
    tuple: (None, 3, [1], {1}, "text"),
    Page: (None, 3, "page"),
    ElementFormat: ("bf16", None, 2),
}


@pytest.fixture(scope="module")
def spec(root: Path) -> CacheSpec:
    return load(root / "examples" / "qwen3.8-flash-next" / "config.json", tp=2, kv_dtype="fp8")


@pytest.fixture(scope="module")
def layout(spec: CacheSpec) -> Layout:
    """Return a layout with every kind of member: packed planes, states, tables, head maps, notes."""
    found = allocate(spec, "trtllm-v2-qsa-packed")
    found = msgspec.structs.replace(found, notes=("a note",), stages=((0, 1),))
    assert all(getattr(found, field) for field in ("pools", "life_cycles", "tables", "accesses", "block_bytes"))
    assert any(buffer.parts for buffer in found.buffers)
    if not found.head_maps:
        found = msgspec.structs.replace(found, head_maps=(HeadMap("target", (0,), 2, 2, ((0, 2),)),))
    return found


def wrong_values(value: Any, hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield a path inside ``value``, and ``value`` with something wrong there, for all of its fields and entries."""
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        (inner,) = [each for each in arguments if each is not type(None)]
        if value is None and inner is int:
            value = 1
        yield from ((path, bad) for path, bad in wrong_values(value, inner) if bad is not None)
        return
    for bad in WRONG.get(tuple if arguments else hint, ()):
        yield "", bad
    if arguments:
        hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        for number, (member, inner) in enumerate(zip(value, hints, strict=True)):
            for path, bad in wrong_values(member, inner):
                yield f"[{number}]{path}", (*value[:number], bad, *value[number + 1 :])
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            for path, bad in wrong_values(getattr(value, field.name), field.type):
                yield f".{field.name}{path}", msgspec.structs.replace(value, **{field.name: bad})


def some_members(layout: Layout) -> Layout:
    """Return ``layout`` with two members of each kind, so that all wrong values can be tried."""
    packed = [buffer for buffer in layout.buffers if buffer.parts][:1]
    plain = [buffer for buffer in layout.buffers if not buffer.parts][:1]
    changes = {field: getattr(layout, field)[:2] for field in ("pools", "life_cycles", "tables", "accesses")}
    return msgspec.structs.replace(layout, buffers=(*plain, *packed), spec=None, **changes)


def test_every_wrong_value_of_every_field_is_named(layout: Layout) -> None:
    small = some_members(layout)
    check_values(small)
    tried = 0
    for path, bad in wrong_values(small, Layout):
        with pytest.raises(SpecError) as caught:
            check_values(bad)
        assert caught.value.field.startswith("layout.")
        named = caught.value.field.removeprefix("layout")
        assert named == path or (path.startswith(named) and named), (named, path)
        assert "needs" in caught.value.problem
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
        tried += 1
    assert tried > 1000


def test_the_check_of_a_layout_refuses_them_too(layout: Layout, spec: CacheSpec) -> None:
    buffers = (msgspec.structs.replace(layout.buffers[0], offset_bytes=0.0), *layout.buffers[1:])
    wrong = msgspec.structs.replace(layout, buffers=buffers)
    needs = f"needs a whole number from {-MAX_WHOLE} to {MAX_WHOLE}"
    with pytest.raises(SpecError) as caught:
        check(wrong)
    assert str(caught.value) == f"layout.buffers[0].offset_bytes: found 0.0, {needs}"
    with pytest.raises(SpecError) as caught:
        allocate(spec, lambda spec: wrong)
    assert caught.value.field == "allocator"
    assert "returned a layout that cannot be checked: layout.buffers[0].offset_bytes: found 0.0" in str(caught.value)


def page_of(layout: Layout, **change: Any) -> Layout:
    first: Buffer = layout.buffers[0]
    page = msgspec.structs.replace(first.page, **change)
    return msgspec.structs.replace(layout, buffers=(msgspec.structs.replace(first, page=page), *layout.buffers[1:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"axes": ("head",)}, "found 1 axes, 3 sizes and 3 strides, needs as many of each"),
        ({"stride_bytes": (-1, 1, 1)}, "found a stride of -1 B, needs at least 0 B"),
        ({"shape": (-1, 1, 1)}, "page.shape[0]: found -1, needs a whole number from 0 to"),
        ({"span_bytes": 1}, "found a span of 1 B, and its strides reach over"),
        (
            {"stride_bytes": (0, 0, 0), "span_bytes": 4},
            "found a page called dense, and its strides leave gaps or overlap",
        ),
    ],
)
def test_a_page_that_contradicts_itself(layout: Layout, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(page_of(layout, **change))
    assert str(caught.value).startswith("layout.buffers[0].page")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [entry.name for entry in ALLOCATORS if entry.kind == "engine"])
def test_the_shipped_allocators_answer_with_the_right_types(spec: CacheSpec, name: str) -> None:
    """They are not asked at run time."""
    plain = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=64, window=8),) * 3, kv_format="nvfp4")
    for each in (spec, plain):
        try:
            check_values(allocate(each, name))
        except Rejected:
            continue


def test_it_costs_less_than_the_rules() -> None:
    large = allocate(CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=64),) * 500), "trtllm-v2")

    def seconds(function: Any) -> float:
        times = []
        for _ in range(5):
            started = time.process_time()
            function()
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(lambda: check_values(large)) < seconds(lambda: check(large, allocated=True))
