"""What a cache refuses, for the documented reason, and that nothing changes then."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from kvsan.model.layers import LatentLayer, RecurrentLayer
from kvsan.sim.cache.managers import running_cache
from kvsan.sim.cache.refusal import REASONS
from kvsan.sim.cache.state import state_key
from kvsan.sim.cache.trace import Trace
from kvsan.strategies.traces import traces

LATENT = LatentLayer(latent_dim=8)
ADMITTED = "admit 0 3;step 1;complete"


@pytest.mark.parametrize(
    ("before", "asked", "reason", "words"),
    [
        ("", "free 0", "unknown-request", "request 0 is not there: admit it first"),
        (f"{ADMITTED};free 0", "free 0", "unknown-request", "request 0 is not there"),
        ("", "extend 3 1", "unknown-request", "request 3"),
        (ADMITTED, "admit 0 1", "known-request", "request 0 is there already: free it first"),
        ("", "admit 0 0", "no-tokens", "give at least 1"),
        (ADMITTED, "rewind 0 1", "below-history", "would be left with 2 tokens, and 3 are accepted"),
        (f"{ADMITTED};extend 0 2", "rewind 0 3", "below-history", "would be left with 2 tokens"),
        (ADMITTED, "rewind 0 0", "no-tokens", "give at least 1"),
        (ADMITTED, "extend 0 200", "no-room", "not free or evictable"),
        (ADMITTED, "extend 0 255", "table-width", "more than the 64 blocks of 4 in a row of the table"),
        (ADMITTED, "step 1", "nothing-waits", "extend one first"),
        ("admit 0 3;step 1 1;step 1 1", "step 1", "steps-in-flight", "complete one first"),
        ("", "complete", "no-step", "dispatch one first"),
        (ADMITTED, "commit 0", "nothing-to-commit", "no further full block"),
        ("admit 0 3", "fork 0 2", "tokens-wait", "3 tokens that are not written yet"),
        (ADMITTED, "fork 0 5", "beams", "into 2 to 4"),
        (f"{ADMITTED};fork 0 2", "fork 0 2", "beams", "has 2 beams"),
        (f"{ADMITTED};fork 0 2", "reorder 0 2", "beams", "asked for parents 2, 0"),
        (f"{ADMITTED};fork 0 2", "commit 0", "beams", "commit before the fork"),
        (ADMITTED, "resume 0", "not-suspended", "is not suspended"),
        (f"{ADMITTED};suspend 0", "extend 0 1", "suspended", "resume it first"),
        (f"{ADMITTED};suspend 0", "suspend 0", "suspended", "is suspended already"),
        ("", "offload 0", "nothing-to-move", "no page is cached"),
        ("", "onload 0", "nothing-to-move", "no cached page is on the host"),
        (f"{ADMITTED};suspend 0;offload 3;admit 1 32 1", "resume 0", "utilization", "8 of 8 slots"),
    ],
)
def test_refusals(drive, before, asked, reason, words) -> None:
    driven = drive([LATENT])
    if before:
        assert driven.do(before).reasons == []
    key = state_key(driven.cache)
    assert driven.do(asked).reasons == [reason]
    assert words in driven.refusals[-1].message
    assert state_key(driven.cache) == key
    assert driven.rules == []


def test_a_state_that_consumed_a_token_cannot_give_it_back(drive) -> None:
    driven = drive([RecurrentLayer(algorithm="short_conv", heads=4, conv_kernel=4)])
    assert driven.do("admit 0 1;step 1;complete;extend 0 1;step 1;complete;rewind 0 1").reasons == [
        "state-cannot-rewind"
    ]
    assert driven.do("extend 0 2;rewind 0 1").reasons == ["state-cannot-rewind"]


def test_v1_neither_suspends_nor_resumes(drive) -> None:
    driven = drive([LATENT], allocator="trtllm-v1").do(f"{ADMITTED};suspend 0;resume 0")
    assert driven.reasons == ["not-supported", "not-supported"]


@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2"])
def test_no_refused_operation_changes_anything(allocator) -> None:
    """All or nothing, whatever came before; only steps may have run on, where room was waited for."""

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(traces(allocator, max_operations=60))
    def run(trace: Trace) -> None:
        cache = running_cache(trace.spec, allocator)
        for number, operation in enumerate(trace.operations):
            key = state_key(cache)
            if cache.apply(number, operation) is not None:
                assert state_key(cache) == key

    run()


def test_every_reason_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "running-cache.md").read_text(encoding="utf-8")
    assert [reason for reason in REASONS if f"| `{reason}` |" not in text] == []
