"""V1 and V2 side by side: equal answers and equal content after every operation that both have."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from kvsan.model.errors import SpecError
from kvsan.model.layers import AttentionLayer, Layer
from kvsan.model.spec import CacheSpec
from kvsan.sim.cache import content
from kvsan.sim.cache.content import compare_managers, logical_content
from kvsan.sim.cache.managers import V1, running_cache
from kvsan.sim.cache.trace import COMMON_KINDS, Operation, Trace
from kvsan.strategies.traces import traces

FULL = AttentionLayer(kv_heads=2, head_dim=8)


def without_sinks(layer: Layer) -> Layer:
    return msgspec.structs.replace(layer, sink_tokens=0) if isinstance(layer, AttentionLayer) else layer


def test_sinks_are_refused_because_one_manager_keeps_none() -> None:
    """Found by drawing: V1 drops the first tokens, which V2 keeps."""
    layers = (FULL, AttentionLayer(kv_heads=2, head_dim=8, window=4, sink_tokens=2))
    with pytest.raises(SpecError, match=r"spec\.layers\[1\]\.sink_tokens: found 2, needs 0"):
        compare_managers(Trace(spec=CacheSpec(layers=layers, tokens_per_block=1, slots=8), operations=()))


def test_the_two_managers_hold_the_same_at_every_step() -> None:
    """With slots enough, so that neither evicts: what is evicted is a manager's own choice."""
    done: Counter[str] = Counter()

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(traces("trtllm-v1", max_operations=60))
    def run(trace: Trace) -> None:
        roomy = msgspec.structs.replace(trace.spec, slots=256, layers=tuple(map(without_sinks, trace.spec.layers)))
        operations = tuple(entry for entry in trace.operations if entry.kind in COMMON_KINDS)
        assert compare_managers(Trace(spec=roomy, operations=operations)) is None
        done.update(entry.kind for entry in operations)

    run()
    assert set(done) == set(COMMON_KINDS)


def test_beams_of_divergent_parents_hold_the_same() -> None:
    text = "admit 0 6;step 1;complete;fork 0 4;extend 0 1;step 1;complete;reorder 0 27;extend 0 3;step 1;complete"
    operations = tuple(Operation(kind, *map(int, rest)) for kind, *rest in map(str.split, text.split(";")))
    trace = Trace(spec=CacheSpec(layers=(FULL,), tokens_per_block=4, slots=64), operations=operations)
    assert compare_managers(trace) is None
    cache = running_cache(trace.spec, "trtllm-v1")
    for number, operation in enumerate(operations):
        cache.apply(number, operation)
    found = logical_content(cache)
    assert {beam for _, beam, _, _ in found} == {0, 1, 2, 3}
    assert all(len(tokens) == 10 and None not in tokens for tokens in found.values())
    # 27 = parents 3, 2, 1, 0: the beams' seventh tokens are exchanged, and what they share is shared still
    keys = [found[0, beam, 0, "key"] for beam in range(4)]
    assert len({tokens[:6] for tokens in keys}) == 1
    assert len({tokens[6] for tokens in keys}) == 4


def test_a_manager_that_differs_is_noticed(monkeypatch) -> None:
    """A canary: V1 that publishes at the end of a request, after all, finds a hit that V2 does not."""
    text = "admit 0 4;step 1;complete;free 0;admit 0 4;step 1 2"
    operations = tuple(Operation(kind, *map(int, rest)) for kind, *rest in map(str.split, text.split(";")))
    trace = Trace(spec=CacheSpec(layers=(FULL,), tokens_per_block=1, slots=16), operations=operations)
    assert compare_managers(trace) is None
    monkeypatch.setattr(content.msgspec.structs, "replace", lambda rules, **_: V1)
    difference = compare_managers(trace)
    assert difference is not None
    assert difference.operation == 4
