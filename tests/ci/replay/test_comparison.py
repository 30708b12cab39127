"""The two verdicts next to each other: what one side reports and the other does not is a finding, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from kvsan.ci.cases import load_case, spec_of
from kvsan.ci.faults import FAULTS
from kvsan.ci.replay.comparison import disagreements, trace_disagreements
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.arena import Arena, arena_findings
from kvsan.sim.cache.trace import Trace
from kvsan.sim.checking import check
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Buffer, Layout, LifeCycle, Pool
from kvsan.sim.page import dense_page
from kvsan.sim.registry import allocate
from kvsan.sim.verdict import judge
from kvsan.strategies import raw_layouts

SPEC = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=64),) * 2, tokens_per_block=4, slots=3)


def moved(layout: Layout) -> Layout:
    """Return ``layout`` with all values where the keys are."""
    keys = {buffer.layer: buffer.offset_bytes for buffer in layout.buffers if buffer.role == "key"}
    buffers = [
        msgspec.structs.replace(buffer, offset_bytes=keys[buffer.layer]) if buffer.role == "value" else buffer
        for buffer in layout.buffers
    ]
    return msgspec.structs.replace(layout, buffers=tuple(buffers))


def test_a_sound_layout_on_both_sides_is_no_disagreement() -> None:
    assert list(disagreements(allocate(SPEC, "trtllm-v2"), [])) == []


def test_what_one_side_misses_is_told_with_its_words() -> None:
    layout = moved(allocate(SPEC, "trtllm-v2"))
    both = arena_findings(layout)
    assert list(disagreements(layout, both)) == []
    rules = sorted({finding.rule for finding in both})
    assert "alias" in rules
    missed = list(disagreements(layout, []))
    assert {finding.rule for finding in missed} == {"replay-mismatch"}
    words = sorted(
        finding.message.partition("static check reports ")[2].partition(" and memory")[0] for finding in missed
    )
    assert words == rules
    sound = allocate(SPEC, "trtllm-v2")
    (invented, *others) = list(disagreements(sound, both))
    assert len(others) == len(rules) - 1
    assert "and the static check does not report it" in invented.message
    assert invented.where == next(finding for finding in both if finding.rule in invented.message).where


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.kind == "layout"], ids=lambda fault: fault.name)
def test_the_arena_and_the_rules_agree_on_the_shipped_faults(fault) -> None:
    """On the smallest spec that shows each fault, bytes that are really written say what the rules say."""
    verdict = judge(fault.minimum, fault.name)
    if verdict.layout is None:
        assert [finding.rule for finding in verdict.faults] == list(fault.rules)
    else:
        assert list(disagreements(verdict.layout, arena_findings(verdict.layout))) == []


def test_overflowing_page_indices_are_no_matter_of_memory() -> None:
    """2^31 pages need no byte offset of more than 64 bits; only consumers with 32-bit byte offsets show on memory."""
    many = msgspec.structs.replace(SPEC, slots=1 << 30)
    layout = allocate(many, "trtllm-v2")
    assert [finding.rule for finding in check(layout)] == ["int32"]
    assert list(disagreements(layout, [])) == []
    narrow = allocate(msgspec.structs.replace(many, consumer=Consumer(offset_bits=32)), "trtllm-v2")
    assert ["int32" in finding.message for finding in disagreements(narrow, [])] == [True]


def test_what_leaves_its_pool_is_never_written_and_no_disagreement() -> None:
    """A cell that ends outside of its pool shares a byte inside: told by both as bounds, and no alias on memory."""
    page = dense_page(ElementFormat.UINT8, ("byte",), (8,))
    layout = Layout(
        allocator="raw",
        pools=(Pool("raw", 0, 0, 1, 20, 20),),
        life_cycles=(LifeCycle("raw", 0),),
        buffers=tuple([Buffer("raw", layer, "view", 0, 0, 8 * layer - layer, 20, 1, 8, page) for layer in range(3)]),
    )
    assert {finding.rule for finding in check(layout)} >= {"bounds", "alias"}
    assert list(disagreements(layout, arena_findings(layout))) == []
    (told, *_) = list(disagreements(layout, []))
    assert "the static check reports" in told.message


def test_a_pool_too_small_for_slots_that_nobody_uses_is_no_matter_of_memory() -> None:
    page = dense_page(ElementFormat.UINT8, ("byte",), (8,))
    layout = Layout(
        allocator="raw",
        pools=(Pool("raw", 0, 0, 3, 8, 16),),
        life_cycles=(LifeCycle("raw", 0),),
        buffers=(Buffer("raw", 0, "view", 0, 0, 0, 8, 2, 8, page),),
    )
    assert [finding.rule for finding in check(layout)] == ["bounds"]
    assert list(disagreements(layout, [])) == []


@pytest.mark.parametrize(
    "name",
    [
        "beam-width-4.json",
        "offload-swap.json",
        "prefix-hit-mid-block.json",
        "rewind-across-blocks.json",
        "suspend-resume-other-slots.json",
    ],
)
def test_what_memory_shows_of_a_trace_alone_is_told(root, name) -> None:
    case = load_case(root / "examples" / "cases" / "traces" / name)
    assert isinstance(case.input, Trace)
    stale = Finding(rule="freshness", message="stale bytes", remedy="")
    other = Finding(rule="replay-mismatch", message="bytes differ", remedy="")
    assert list(trace_disagreements(case.input, case.allocator, [other])) == []
    (told,) = trace_disagreements(case.input, case.allocator, [stale, stale, other])
    assert told.rule == "replay-mismatch"
    assert "memory shows freshness and the simulated cache does not report it: stale bytes" in told.message


@settings(max_examples=60, deadline=None)
@given(raw_layouts())
def test_the_arena_and_the_rules_agree_on_any_layout(layout) -> None:
    arena = Arena.build(layout, max_bytes=16 << 20)
    assert list(disagreements(arena.layout, arena.findings())) == []


def test_saved_cases_agree(root) -> None:
    for name in ("33720103f328496b3311173b4709724f.json", "72309a23ec117f7bfad332cf53fca576.json"):
        case = load_case(root / "examples" / "cases" / name)
        layout = allocate(spec_of(case), case.allocator)
        assert list(disagreements(layout, arena_findings(layout))) == []
