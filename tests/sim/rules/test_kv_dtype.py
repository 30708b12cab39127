"""Rule ``kv-dtype``: of decisions, and of the pages that an allocator stores."""

from __future__ import annotations

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer
from kvsan.model.selection import AccuracyReference, KvRequest, decide_kv_format
from kvsan.model.selection.kv_dtype import FAULTY_POLICIES
from kvsan.model.spec import CacheSpec, Draft
from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.sim.page import dense_page
from kvsan.sim.registry import allocate
from kvsan.sim.rules.kv_dtype import RULE, check_kv_dtype

replace = msgspec.structs.replace
FALLS_BACK, MISSING_IS_ANY = FAULTY_POLICIES
BF16, FP8, NVFP4 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4


def test_another_format_than_the_one_asked_for() -> None:
    request = KvRequest(requested=NVFP4, supported=(BF16, FP8))
    (finding,) = check_kv_dtype(decide_kv_format(request, (), FALLS_BACK))
    assert (finding.rule, finding.message) == (
        "kv-dtype",
        "the KV format nvfp4 is asked for, and the run has fp8",
    )
    assert list(check_kv_dtype(decide_kv_format(request))) == []


def test_a_reference_of_another_format() -> None:
    plain = AccuracyReference(name="plain")
    request = KvRequest(requested=FP8)
    (finding,) = check_kv_dtype(decide_kv_format(request, (plain,), MISSING_IS_ANY))
    assert finding.message == (
        "the run has KV in fp8, and the accuracy reference plain was measured with bf16: it has no KV selector"
    )
    assert list(check_kv_dtype(decide_kv_format(request, (plain,)))) == []
    other = decide_kv_format(request)
    other = replace(other, reference=AccuracyReference(name="other", kv_format=NVFP4))
    (finding,) = check_kv_dtype(other)
    assert finding.message.endswith("was measured with nvfp4: it has another KV selector")


def stored(layout: Layout, role: str, kv_format: ElementFormat) -> Layout:
    """Return ``layout`` with the pages of a role declared to be of another format."""
    buffers = [
        replace(buffer, page=dense_page(kv_format, buffer.page.axes, buffer.page.shape))
        if buffer.role == role
        else buffer
        for buffer in layout.buffers
    ]
    return replace(layout, buffers=tuple(buffers))


def messages(layout: Layout) -> list[str]:
    return [finding.message for finding in check(layout, rules=(RULE,))]


@pytest.mark.parametrize(("role", "wrong"), [("key", FP8), ("value", ElementFormat.FP16)])
def test_pages_in_a_format_that_nobody_asked_for(role, wrong) -> None:
    layout = allocate(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),) * 3), "trtllm-v2")
    assert messages(layout) == []
    assert messages(stored(layout, role, wrong)) == [
        f"layer 0's {role} is stored as {wrong.value}, and bf16 is asked for"
    ]
    assert messages(replace(stored(layout, role, wrong), spec=None)) == []


def test_the_format_of_a_layer_wins_over_the_specs() -> None:
    layers = (AttentionLayer(kv_heads=1, head_dim=64), AttentionLayer(kv_heads=1, head_dim=64, kv_format=FP8))
    draft = Draft(mode="separate", layers=(AttentionLayer(kv_heads=1, head_dim=64, kv_format=NVFP4),))
    layout = allocate(CacheSpec(layers=layers, draft=draft), "trtllm-v2")
    assert messages(layout) == []
    assert len(messages(stored(layout, "key", FP8))) == 2
    assert messages(stored(layout, "key", BF16))[1:] == [
        "draft layer 2's key is stored as bf16, and nvfp4 is asked for"
    ]


def test_plain_bytes_declare_no_format() -> None:
    layout = allocate(CacheSpec(layers=(LatentLayer(latent_dim=64),), kv_format=NVFP4), "trtllm-v2")
    assert messages(layout) == []
    assert messages(stored(layout, "key", ElementFormat.UINT8)) == []
    assert messages(stored(layout, "key", ElementFormat.INT8)) == []
    assert len(messages(stored(layout, "key", FP8))) == 1
