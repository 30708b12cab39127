"""The rules of the running cache, each broken by the published fault that it is there for, or by a planted one."""

from __future__ import annotations

import pytest

from kvsan.ci.faults import fault_named
from kvsan.model.layers import AttentionLayer
from kvsan.sim.cache.run import run_trace

BROKEN_BY = {
    "namespace": "fault:rewind-leaves-table",
    "refcount": "fault:hit-not-held",
    "cache-key": "fault:key-without-lora",
    "conservation": "fault:partial-allocation-kept",
    "in-flight": "fault:free-at-output",
    "freshness": "fault:partial-copy-forgets-scales",
    "window": "fault:window-end-off-by-one",
    "sentinel": "fault:padding-writes-slot-zero",
}


@pytest.mark.parametrize(("rule", "name"), BROKEN_BY.items())
def test_a_rule_is_broken_by_its_fault_and_not_by_the_sound_cache(rule: str, name: str) -> None:
    fault = fault_named(name)
    assert rule in fault.rules
    assert rule in run_trace(fault.trace, name).rules
    assert run_trace(fault.trace, fault.base).rules == ()


def test_a_step_without_a_page_to_write_is_out_of_capacity(drive) -> None:
    driven = drive([AttentionLayer(kv_heads=1, head_dim=8)]).do("admit 0 6")
    driven.cache.sequences[0].blocks[0][0][-1] = None
    driven.do("step 1 255")
    assert "capacity" in driven.rules
