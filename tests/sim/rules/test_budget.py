from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.sim.checking import check
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Buffer, Layout, LifeCycle, Pool
from kvsan.sim.page import data_bytes, strided_page

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("budget", sound_layout) == []


@pytest.mark.parametrize("wrong", [-1, 1])
def test_an_estimate_that_is_off(sound_layout: Layout, found: Found, wrong: int) -> None:
    for number, (manager, estimate) in enumerate(sound_layout.block_bytes):
        estimates = list(sound_layout.block_bytes)
        estimates[number] = manager, estimate + wrong
        findings = found("budget", msgspec.structs.replace(sound_layout, block_bytes=tuple(estimates)))
        assert [finding.message for finding in findings] == [
            f"the {manager} manager is sized for {estimate + wrong} B per block of tokens, and a block "
            f"takes {estimate} B"
        ]


@pytest.mark.parametrize(
    ("name", "layer", "role"),
    [
        ("packed-fp8", 1, "side_planes"),
        ("packed-nvfp4", 3, "value_block_scale"),
        ("legacy-bf16", 1, "qsa_index_position"),
        ("v1-latent", 0, "index_key"),
    ],
)
def test_a_buffer_that_nobody_counted(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, name: str, layer: int, role: str
) -> None:
    """A cost model that forgets side planes or block scales."""
    layout = sound[name]
    (manager, estimate), *_ = layout.block_bytes
    forgotten = estimate - layout.buffers[place(layout, layer, role)].page_bytes
    findings = found("budget", msgspec.structs.replace(layout, block_bytes=((manager, forgotten),)))
    assert f"sized for {forgotten} B per block of tokens, and a block takes {estimate} B" in findings[0].message


def test_states_are_per_request(sound: Mapping[str, Layout], found: Found) -> None:
    """They do not count in a block of tokens."""
    layout = sound["v2-halves"]
    paged = sum(buffer.page_bytes for buffer in layout.buffers if buffer.role in ("key", "value"))
    states = sum(buffer.page_bytes for buffer in layout.buffers) - paged
    assert states > 0
    assert layout.block_bytes == (("target", paged),)
    assert found("budget", msgspec.structs.replace(layout, block_bytes=(("target", paged + states),)))


def test_a_slot_that_is_not_filled(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = sound["v2-dense"]
    for wrong in (3071, 3073):
        findings = found("budget", change(layout, "pools", 0, slot_bytes=wrong))
        assert [finding.message for finding in findings] == [
            f"a slot of pool 0 of group 0 has {wrong} B, and its buffers take 3072 B with 0 B of declared padding"
        ]
    assert found("budget", change(layout, "pools", 0, slot_bytes=3200, padding_bytes=128)) == []
    findings = found("budget", change(layout, "pools", 0, padding_bytes=128))
    assert "has 3072 B, and its buffers take 3072 B with 128 B of declared padding" in findings[0].message


def test_merged_life_cycles_share_a_slot(sound: Mapping[str, Layout], found: Found) -> None:
    """Two life cycles read one slot each in its own way: the slot is the larger, not the sum."""
    layout = sound["v2-windows"]
    assert len(layout.pools) == 1
    assert layout.pools[0].slot_bytes * 2 == sum(buffer.page_bytes for buffer in layout.buffers)
    assert found("budget", layout) == []


def test_pools_beyond_the_quota(sound: Mapping[str, Layout], found: Found) -> None:
    layout = sound["packed-fp8"]
    assert layout.spec is not None
    total = sum(pool.size_bytes for pool in layout.pools)
    for quota, silent in ((total, True), (total - 1, False)):
        spec = msgspec.structs.replace(layout.spec, slots=None, state_slots=None, quota_bytes=quota)
        findings = found("budget", msgspec.structs.replace(layout, spec=spec))
        assert (findings == []) == silent
    assert findings[0].message == f"all pools together take {total} B, and the quota is {total - 1} B"


def interleaved(page_bytes: int) -> Layout:
    """Return K and V of 8 tokens, 4 B each, token by token in a slot of 64 B."""
    page = strided_page(ElementFormat.UINT8, ("token", "dim"), (8, 4), (8, 1))
    assert (page.span_bytes, data_bytes(page)) == (60, 32)
    buffers = [
        Buffer("target", 0, role, 0, 0, offset, 64, 2, page_bytes, page) for role, offset in (("key", 0), ("value", 4))
    ]
    return Layout(
        allocator="interleaved",
        pools=(Pool("target", 0, 0, 2, 64, 128),),
        life_cycles=(LifeCycle("target", 0),),
        buffers=tuple(buffers),
    )


def test_pages_that_interleave_take_their_own_bytes(found: Found) -> None:
    """Counted with their gaps they fill a slot twice, and the remedy says what to count."""
    assert check(interleaved(32)) == []
    (finding,) = check(interleaved(60))
    assert finding.rule == "budget"
    assert "has 64 B, and its buffers take 120 B" in finding.message
    words = "; if other pages lie between the elements of layer 0's key, its page_bytes are its own 32 B alone"
    assert finding.remedy.endswith(words)
    (plain,) = found("budget", interleaved(31))
    assert "elements" not in plain.remedy
