"""Each rule of a running cache, broken by hand (books and tables changed behind the cache's back), and by a fault."""

from __future__ import annotations

import pytest

from kvsan.ci.faults import fault_named
from kvsan.model.layers import LatentLayer, RecurrentLayer
from kvsan.sim.cache.run import run_trace

LATENT = LatentLayer(latent_dim=8)
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
ADMITTED = "admit 0 3;step 1;complete;extend 0 1"


def test_a_missing_page_breaks_capacity(drive) -> None:
    driven = drive([LATENT], tokens=1).do("admit 0 2;step 1 1;complete")
    driven.cache.sequences[0].blocks[0][0][1] = None
    assert driven.do("step 1").rules == ["capacity"]
    message = driven.cache.shadow.findings[0].message
    assert message == "step 2 writes token 1 of request 0, beam 0, which has no page for it"


def test_a_moved_page_breaks_namespace(drive) -> None:
    driven = drive([LATENT]).do(ADMITTED)
    driven.cache.table_row = lambda *_: [9]
    assert driven.do("step 1").rules == ["namespace", "bounds"]
    message = driven.cache.shadow.findings[0].message
    assert message == "block 0 of request 0 is 9 in the page table, and its page is in slot 0"


def test_a_slot_in_the_free_list_twice_breaks_conservation(drive) -> None:
    driven = drive([LATENT], slots=2).do("admit 0 1;step 1;complete")
    driven.cache.pools[0].recycled.appendleft((0, 0))
    assert driven.do("admit 1 1").rules == ["conservation"]
    assert "slot 0 of group 0 is handed out while another page holds it" in driven.cache.shadow.findings[0].message


def test_writing_a_published_page_breaks_refcount(drive) -> None:
    driven = drive([LATENT]).do(ADMITTED)
    page = driven.cache.sequences[0].blocks[0][0][0]
    driven.cache.ledger.publish(page, published=True)
    assert driven.do("step 1").rules == ["refcount"]


def test_a_slot_used_too_early_breaks_in_flight(drive) -> None:
    driven = drive([LATENT], slots=1).do("admit 0 1;step 1;free 0")
    driven.cache.pools[0].recycled[0] = (0, 0)
    assert driven.do("admit 1 1").rules == ["in-flight"]


def test_a_dropped_block_breaks_window(drive) -> None:
    driven = drive([LatentLayer(latent_dim=8, window=2)], tokens=1).do("admit 0 2;step 1;complete;extend 0 1")
    page = driven.cache.sequences[0].blocks[0][0][1]
    driven.cache.sequences[0].blocks[0][0][1] = None
    driven.cache.release(page)
    assert driven.do("step 1").rules == ["window"]
    assert "attends to position 1, whose block 1 was dropped" in driven.cache.shadow.findings[0].message


def test_a_key_that_stands_for_two_texts_breaks_cache_key(drive) -> None:
    driven = drive([LATENT], tokens=1)
    driven.cache.block_key = lambda text, contents, end: end
    assert driven.do("admit 0 2;step 1;complete;commit 0;admit 1 2 1").rules == []  # text 1 begins as text 0 does
    assert driven.do("admit 2 2 8").rules == ["cache-key"]


def test_a_padding_row_on_a_live_slot_breaks_sentinel(drive) -> None:
    driven = drive([RecurrentLayer(algorithm="short_conv", heads=4, conv_kernel=4)], slots=2)
    driven.cache.padding_slot = lambda cycle: 0
    assert driven.do("admit 0 1;step 1 0 1").rules == ["sentinel"]


def test_a_page_published_under_its_writer_breaks_freshness(drive) -> None:
    driven = drive([LATENT], tokens=1).do("admit 0 1;step 1")
    driven.cache.ledger.publish(driven.cache.sequences[0].blocks[0][0][0], published=True)
    assert driven.rules == ["freshness"]


@pytest.mark.parametrize(("rule", "name"), BROKEN_BY.items())
def test_a_rule_is_broken_by_its_fault_and_not_by_the_sound_cache(rule: str, name: str) -> None:
    fault = fault_named(name)
    assert rule in fault.rules
    assert rule in run_trace(fault.trace, name).rules
    assert run_trace(fault.trace, fault.base).rules == ()
