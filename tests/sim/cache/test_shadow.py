"""Ownership of bytes: planted strays are seen, and the stream of records does to real bytes what the shadow says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer
from kvsan.model.spec import CacheSpec
from kvsan.sim.cache.geometry import geometry_of
from kvsan.sim.cache.managers import running_cache
from kvsan.sim.cache.records import FRESH_BYTE, digit_of, execute
from kvsan.sim.cache.shadow import FRESH, Shadow
from kvsan.sim.cache.trace import Trace
from kvsan.sim.registry import allocate
from kvsan.strategies.traces import traces

FULL = AttentionLayer(kv_heads=2, head_dim=8)
SCALED = AttentionLayer(kv_heads=1, head_dim=16, kv_format=ElementFormat.NVFP4)
CONVOLUTION = RecurrentLayer(algorithm="short_conv", heads=4, conv_kernel=4)


def test_a_stray_byte_is_seen_by_the_next_read(drive) -> None:
    driven = drive([FULL, FULL], tokens=2, slots=4).do("admit 0 3;step 1;complete;extend 0 1;step 1")
    cycle = driven.cache.paged[0]
    byte = int(cycle.read[driven.slots(0)[0] * 2 + 1, -1])  # the last byte of token 1: layer 1's value
    driven.cache.shadow.tags[byte] = 1 << 16
    driven.do("complete")
    assert driven.rules == ["freshness"]
    message = driven.cache.shadow.findings[0].message
    assert "for layer 1's value of request 0, beam 0, position 1, written by step 1, and finds layer 0's key" in message


def test_an_untouched_byte_is_seen_too(drive) -> None:
    driven = drive([SCALED], tokens=2, slots=4).do("admit 0 2;step 1;complete;extend 0 1;step 1")
    cycle = driven.cache.paged[0]
    scales = [int(byte) for byte, cell in zip(cycle.read[0], cycle.read_cells, strict=True) if cell == 2]
    driven.cache.shadow.tags[scales[0]] = FRESH
    assert "layer 0's key_block_scale" in driven.do("complete").cache.shadow.findings[0].message


@pytest.mark.parametrize(
    ("layers", "kv_format"),
    [
        ((FULL, FULL), "bf16"),
        ((AttentionLayer(kv_heads=2, head_dim=16),), "nvfp4"),
        ((FULL, CONVOLUTION), "fp8"),
        ((LatentLayer(latent_dim=8),), "bf16"),
    ],
)
@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2"])
def test_the_geometry_of_a_slot_is_that_of_the_layout(layers, kv_format, allocator) -> None:
    """Every byte of every page belongs to one token of one role, at the layout's own place, whoever addresses it."""
    layout = allocate(CacheSpec(layers=layers, kv_format=kv_format, tokens_per_block=3, slots=3), allocator)
    geometry = geometry_of(layout)
    for cycle in geometry.cycles:
        for rows, cells in ((cycle.write, cycle.write_cells), (cycle.read, cycle.read_cells)):
            for number in dict.fromkeys(cells.tolist()):
                buffer = layout.buffers[geometry.targets[number].buffer]
                start = geometry.pool_starts[buffer.pool] + buffer.offset_bytes
                for slot in range(buffer.slot_count):
                    found = rows[slot * cycle.tokens : (slot + 1) * cycle.tokens][:, cells == number]
                    first = start + slot * buffer.slot_stride_bytes
                    assert sorted(found.ravel().tolist()) == list(range(first, first + buffer.page_bytes))


def test_head_major_pages_scatter_a_token_over_its_heads() -> None:
    """2 heads x 3 tokens x 8 bf16: a token's K is 16 B in each head, 48 B apart."""
    spec = CacheSpec(layers=(FULL,), tokens_per_block=3, slots=1)
    geometry = geometry_of(allocate(spec, "trtllm-v2"))
    start = geometry.pool_starts[0]
    key = geometry.cycles[0].write[1][geometry.cycles[0].write_cells == 0] - start
    assert key.tolist() == [*range(16, 32), *range(64, 80)]


def test_layouts_that_traces_do_not_run_on() -> None:
    large = allocate(CacheSpec(layers=(FULL,), slots=1 << 20), "trtllm-v2")
    with pytest.raises(SpecError, match=r"spec.slots: found a layout of \d+ B, traces run on at most 8388608 B"):
        geometry_of(large)
    with pytest.raises(SpecError, match="found a layout without a spec"):
        geometry_of(msgspec.structs.replace(large, spec=None))


@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2", "fault:one-host-table", "fault:copy-two-planes"])
def test_records_do_to_bytes_what_the_shadow_says(allocator) -> None:
    """Another executor on plain bytes ends with the shadow's image, in every digit; its reads fail where ours do."""

    @settings(max_examples=25, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(traces(allocator, max_operations=40))
    def run(trace: Trace) -> None:
        cache = running_cache(trace.spec, allocator, record=True)
        for number, operation in enumerate(trace.operations):
            cache.apply(number, operation)
        records = cache.shadow.records
        assert records is not None
        numbers = [record.operation for record in records]
        assert numbers == sorted(numbers)
        for digit in (0, 1, 2):
            memory = Shadow(cache.geometry).image(digit)
            wrong = execute(records, memory, digit)
            expected = cache.shadow.image(digit)
            assert all((memory[place] == expected[place]).all() for place in expected)
            if "freshness" not in cache.shadow.broken:
                assert wrong == []

    run()


def test_records_are_runs_of_one_owner(drive) -> None:
    driven = drive([FULL], tokens=2, slots=2, record=True).do("admit 0 1;step 1;complete")
    records = driven.cache.shadow.records
    fills = [record for record in records if record.kind == "fill"]
    writes = [record for record in records if record.kind == "write"]
    assert [(record.offset_bytes, record.bytes, record.owner) for record in fills] == [
        (0, 128, FRESH_BYTE),  # a slot: K and V of 2 heads x 2 tokens x 16 B
        (0, 64, 0),  # the cache clears K, then V
        (64, 64, 0),
    ]
    assert [(record.offset_bytes, record.bytes) for record in writes] == [(0, 16), (32, 16), (64, 16), (96, 16)]
    assert {(record.view, record.space, record.pool) for record in writes} == {("writer", "device", 0)}
    assert [digit_of(record.owner, 2) for record in writes] == [1, 1, 1, 1]  # event 1, above 16 bits of the target
    assert [digit_of(record.owner, 0) for record in writes] == [0, 0, 1, 1]  # the target: K, then V
