"""Known right values: how many slots, which ones, what is shared, copied, dropped and kept."""

from __future__ import annotations

import itertools

import pytest

from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer
from kvsan.sim.cache.sequence import Contents, token_of

LATENT = LatentLayer(latent_dim=8)
FULL = AttentionLayer(kv_heads=2, head_dim=8)
CONVOLUTION = RecurrentLayer(algorithm="short_conv", heads=4, conv_kernel=4)
both = pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2"])


def window(tokens: int, sinks: int = 0) -> AttentionLayer:
    return AttentionLayer(kv_heads=1, head_dim=8, window=tokens, sink_tokens=sinks)


@both
def test_a_request_holds_a_slot_for_each_block_begun(drive, allocator) -> None:
    driven = drive([LATENT], allocator=allocator).do("admit 0 5;extend 0 3;extend 0 1")
    assert len(driven.slots(0)) == driven.used() == 3


@both
@pytest.mark.parametrize(("tokens", "beams"), [(6, 4), (8, 4), (9, 2), (3, 3)])
def test_beams_share_full_blocks_and_nothing_else(drive, allocator, tokens, beams) -> None:
    """Slots at the fork: full blocks once, the partial one per beam; then every new block per beam."""
    driven = drive([LATENT], slots=32, allocator=allocator)
    driven.do(f"admit 0 {tokens};step 1;complete;fork 0 {beams}")
    full, rest = divmod(tokens, 4)
    assert driven.used() == full + beams * bool(rest)
    driven.do("extend 0 5")
    blocks = -(-(tokens + 5) // 4)
    assert driven.used() == full + beams * (blocks - full)
    rows = [driven.slots(0, beam=beam) for beam in range(beams)]
    assert all(len({row[block] for row in rows}) == (1 if block < full else beams) for block in range(blocks))
    assert driven.rules == []


def test_the_cache_indirection_follows_the_parents(drive) -> None:
    driven = drive([FULL], tokens=2, slots=32).do("admit 0 2;step 1;complete;fork 0 3")
    driven.do("extend 0 1;step 1;complete")
    driven.do(f"reorder 0 {0 | 0 << 2 | 2 << 4};extend 0 1;step 1;complete")
    sequence = driven.cache.sequences[0]
    assert sequence.origin == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 2, 2]]
    driven.do(f"reorder 0 {2 | 1 << 2 | 1 << 4};extend 0 1;step 1;complete")
    assert sequence.origin == [[0, 0, 2, 2, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 2]]
    assert driven.rules == []


@both
def test_a_window_keeps_exactly_what_the_next_query_sees(drive, allocator) -> None:
    """Brute force: a block is there when the query at the history, or a later one, attends to one of its tokens."""
    for tokens, width in itertools.product((1, 2, 3, 4), (1, 2, 3, 5, 8)):
        driven = drive([window(width)], tokens=tokens, slots=64, allocator=allocator)
        driven.do("admit 0 1;step 1;complete")
        for history in range(1, 20):
            driven.do("extend 0 1;step 1;complete")
            kept = [slot >= 0 for slot in driven.slots(0)]
            needed = [
                any(position > history - width for position in range(block * tokens, (block + 1) * tokens))
                for block in range(len(kept))
            ]
            assert kept == needed
        assert driven.rules == []


def test_sink_blocks_stay(drive) -> None:
    driven = drive([window(4, sinks=3)], tokens=2, slots=64)
    driven.do("admit 0 1;step 1;complete" + ";extend 0 1;step 1;complete" * 20)
    assert [slot >= 0 for slot in driven.slots(0)] == [True, True] + [False] * 6 + [True] * 3
    assert driven.rules == []


@both
def test_a_hit_takes_full_blocks_and_copies_the_partial_one(drive, allocator) -> None:
    driven = drive([FULL], tokens=4, slots=16, allocator=allocator)
    driven.do("admit 0 12;step 1;complete;commit 0;admit 1 9 6")  # text 6 has the first 6 tokens of text 0
    assert driven.slots(1)[0] == driven.slots(0)[0]
    assert not set(driven.slots(1)[1:]) & set(driven.slots(0))
    sequence = driven.cache.sequences[1]
    assert (sequence.done, sequence.scheduled) == (6, 6)
    assert sequence.events[0] == driven.cache.sequences[0].events[0][:6]


def test_the_last_token_of_a_prompt_is_always_computed(drive) -> None:
    driven = drive([FULL], tokens=2, slots=16).do("admit 0 4;step 1;complete;commit 0;admit 1 4")
    assert driven.cache.sequences[1].done == 3


@both
def test_another_scope_is_no_hit(drive, allocator) -> None:
    driven = drive([FULL], tokens=2, slots=16, allocator=allocator).do("admit 0 4;step 1;complete;commit 0;admit 1 4 8")
    assert driven.cache.sequences[1].done == 0


def test_committing_what_is_published_already_goes_on_with_the_published_pages(drive) -> None:
    driven = drive([FULL], tokens=2, slots=16).do("admit 0 4;admit 1 4;step 3;complete;commit 0")
    before = driven.slots(1)
    driven.do("commit 1")
    assert driven.slots(1) == driven.slots(0) != before
    assert driven.used() == 2
    driven.do("extend 1 1;step 2;complete")
    assert driven.rules == []


def test_states_are_reused_at_a_snapshot_alone(drive) -> None:
    driven = drive([FULL, CONVOLUTION], tokens=2, slots=16)
    driven.do("admit 0 4;step 1 2;complete;commit 0;step 1;complete;commit 0;admit 1 4;admit 2 6")
    assert driven.cache.sequences[1].done == 2
    assert driven.cache.sequences[2].done == 4
    driven.do("step 6;complete;free 0;extend 1 1;step 2;complete")
    assert driven.rules == []


def test_freed_slots_wait_for_their_step(drive) -> None:
    driven = drive([LATENT], tokens=1, slots=2).do("admit 0 1;step 1;free 0;admit 1 1")
    assert driven.slots(1) == [1]
    driven.do("free 1;admit 0 2")  # two slots: one of them must be waited for
    assert (driven.cache.flight, driven.cache.ledger.completed, driven.rules) == ([], 1, [])


def test_v1_uses_its_slots_in_turn_and_v2_those_used_before(drive) -> None:
    text = "admit 0 1;step 1;complete;free 0;admit 1 1"
    assert drive([LATENT], tokens=2, slots=4).do(text).slots(1) == [0]
    assert drive([LATENT], tokens=2, slots=4, allocator="trtllm-v1").do(text).slots(1) == [1]


def test_suspended_pages_come_back_elsewhere_with_their_bytes(drive) -> None:
    driven = drive([LATENT], tokens=2, slots=6).do("admit 0 4;step 1;complete")
    before = driven.slots(0)
    driven.do("suspend 0;offload 3;admit 1 3;resume 0;extend 0 1;step 1;complete")
    assert driven.slots(0)[:2] != before
    assert driven.rules == []


def test_a_swap_leaves_the_block_its_id(drive) -> None:
    """V1 with four slots: the block that went to the host keeps id 0, and slot 0 is block 4's now."""
    driven = drive([LATENT], tokens=1, slots=4, allocator="trtllm-v1")
    driven.do("admit 0 4;step 1;complete;free 0;offload 0;admit 1 1 1")
    page = driven.cache.sequences[1].blocks[0][0][0]
    assert (page.slot, page.block_id) == (0, 4)


def test_padding_rows_have_a_state_of_their_own(drive) -> None:
    driven = drive([CONVOLUTION], slots=2).do("admit 0 1;step 1 0 1;complete")
    assert (driven.used(), driven.cache.padding_slot(driven.cache.recurrent[0]), driven.rules) == (2, 1, [])
    assert driven.do("admit 1 1").reasons == ["no-room"]


def test_texts_share_their_beginning() -> None:
    contents = Contents()
    base = contents.prompt(0, 8)
    for text in range(1, 8):
        other = contents.prompt(text, 8)
        assert [one == two for one, two in zip(base, other, strict=True)] == [place < text for place in range(8)]
    assert not set(contents.prompt(8, 8)) & set(base)
    assert len({token_of(0, 5, beam) for beam in range(-1, 4)}) == 5
