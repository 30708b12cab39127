from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate

Found = Callable[[str, Layout], list[Finding]]


def dense(layers: int, slots: int, *, tokens_per_block: int = 32, **consumer: int) -> Layout:
    """Return K/V pages of ``layers`` layers, so 2 * ``layers`` pages per slot."""
    layer = AttentionLayer(kv_heads=1, head_dim=128)
    spec = CacheSpec(
        layers=(layer,) * layers, slots=slots, tokens_per_block=tokens_per_block, consumer=Consumer(**consumer)
    )
    return allocate(spec, "trtllm-v2")


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("int32", sound_layout) == []


@pytest.mark.parametrize(("pages", "ceiling"), [(24, 89478485), (36, 59652323), (96, 22369621)])
def test_the_last_slot_that_an_index_counts(found: Found, pages: int, ceiling: int) -> None:
    assert ceiling == 2**31 // pages
    assert found("int32", dense(pages // 2, ceiling)) == []
    findings = found("int32", dense(pages // 2, ceiling + 1))
    assert [finding.message for finding in findings] == [
        f"{ceiling + 1} slots of {pages} pages give page indices up to {(ceiling + 1) * pages - 1}, and a signed "
        "32-bit index ends at 2147483647"
    ]
    assert findings[0].remedy == f"use at most {ceiling} slots, or an index of 64 bits"


@pytest.mark.parametrize("slots", [2**30 - 1, 2**30, 2**30 + 1])
def test_the_largest_index_may_be_the_largest_integer(found: Found, slots: int) -> None:
    """With 2 pages per slot the last index is 2 * slots - 1."""
    assert bool(found("int32", dense(1, slots))) == (2 * slots - 1 > 2**31 - 1)


def test_an_index_of_64_bits(found: Found) -> None:
    assert found("int32", dense(12, 89478486, index_bits=64)) == []


def test_kernel_pages_within_a_block_count(found: Found) -> None:
    layer = AttentionLayer(kv_heads=1, head_dim=128, tokens_per_block=8)
    for slots, fine in ((2**28, True), (2**28 + 1, False)):  # 2 pages of 4 kernel pages each
        layout = allocate(CacheSpec(layers=(layer,), tokens_per_block=32, slots=slots), "trtllm-v2")
        assert (found("int32", layout) == []) == fine


def test_a_byte_offset_of_32_bits(found: Found) -> None:
    """1 layer of 8192 B pages: 16384 B per slot, so the last byte of slot 131071 is 2^31 - 1."""
    assert found("int32", dense(1, 131072, offset_bits=32)) == []
    findings = found("int32", dense(1, 131073, offset_bits=32))
    assert [finding.message for finding in findings][:1] == [
        "the attention-op of layer 0's key reaches byte offset 2147491839, and a signed 32-bit offset "
        "ends at 2147483647"
    ]
    assert found("int32", dense(1, 131073)) == []  # 64 bits, unless a consumer says otherwise


def test_a_layout_without_a_spec(sound: Mapping[str, Layout], found: Found) -> None:
    layout = msgspec.structs.replace(dense(12, 89478486), spec=None)
    assert len(found("int32", layout)) == 1


def test_states_have_no_page_index(sound: Mapping[str, Layout], found: Found) -> None:
    """Only byte offsets bind them."""
    layout = sound["v1-hybrid"]
    states = [index for index, buffer in enumerate(layout.buffers) if buffer.role == "ssm_state"]
    buffers = tuple(
        msgspec.structs.replace(buffer, slot_count=2**31 + 1) if index in states else buffer
        for index, buffer in enumerate(layout.buffers)
    )
    assert found("int32", msgspec.structs.replace(layout, buffers=buffers)) == []
