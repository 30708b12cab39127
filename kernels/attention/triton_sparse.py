"""QSA-style selection: index scores of blocks, and the best blocks' pages.

The score of a token is the product of the index query and the token's index key, both turned by their positions (three
coordinates each, as multimodal rotary embeddings have them); a block's score is its best token's. A block is a page.
"""

# mypy: ignore-errors
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

_INDEX = [f"{name}_{part}" for name in ("key", "place") for part in ("start", "slot", "token", "dim")]


@triton.jit
def _angles(pair, coordinates, half, base_log2):
    """Return the angle of each pair: its coordinate times base^(-pair / half); coordinates take turns over pairs."""
    return coordinates * tl.exp2(pair.to(tl.float32) * (-base_log2))


@triton.jit(do_not_specialize=["heads", "half", "page_tokens", "table_row", "base_log2", *_INDEX])
def block_scores(queries, query_places, keys, places, table, lengths, scores, base_log2, heads: tl.int32,
                 half: tl.int32, page_tokens: tl.int32, table_row: tl.int64, key_start: tl.int64, key_slot: tl.int64,
                 key_token: tl.int64, key_dim: tl.int64, place_start: tl.int64, place_slot: tl.int64,
                 place_token: tl.int64, place_dim: tl.int64, PAIRS: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Store the score of page ``program_id(1)`` of request ``program_id(0)``, minus infinity past its end.

    ``queries`` (requests, heads, 2 * half) fp32 and ``query_places`` (requests, 3) int32 are dense; scores of several
    heads are added up per token.
    """
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + request)
    slot = tl.load(table + request * table_row + block).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    axis = pair % 3
    paired = pair < half
    turn = _angles(pair, tl.load(query_places + request * 3 + axis).to(tl.float32), half, base_log2)
    cos_q, sin_q = tl.cos(turn), tl.sin(turn)
    best = tl.full([], float("-inf"), tl.float32)
    for first in range(0, page_tokens, TOKENS):
        entry = first + tl.arange(0, TOKENS)
        meant = (entry < page_tokens) & (block * page_tokens + entry < length)
        rows = key_start + slot * key_slot + entry.to(tl.int64) * key_token
        inside = meant[:, None] & paired[None, :]
        at = rows[:, None] + pair.to(tl.int64)[None, :] * key_dim
        real = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        imaginary = tl.load(keys + at + half.to(tl.int64) * key_dim, mask=inside, other=0.0).to(tl.float32)
        spot = place_start + slot * place_slot + entry.to(tl.int64) * place_token
        where = tl.load(places + spot[:, None] + axis.to(tl.int64)[None, :] * place_dim, mask=inside, other=0)
        angle = _angles(pair[None, :], where.to(tl.float32), half, base_log2)
        cos_k, sin_k = tl.cos(angle), tl.sin(angle)
        turned_real = real * cos_k - imaginary * sin_k
        turned_imaginary = real * sin_k + imaginary * cos_k
        total = tl.zeros([TOKENS], tl.float32)
        for head in range(heads):
            query = queries + (request * heads + head) * 2 * half + pair
            real_q = tl.load(query, mask=paired, other=0.0)
            imaginary_q = tl.load(query + half, mask=paired, other=0.0)
            left = (real_q * cos_q - imaginary_q * sin_q)[None, :]
            right = (real_q * sin_q + imaginary_q * cos_q)[None, :]
            total += tl.sum(turned_real * left + turned_imaginary * right, axis=1)
        peak = tl.max(tl.where(meant, total, float("-inf")), axis=0)
        # a comparison that NaN fails would drop it: keep it, so that it reaches the check
        best = tl.where(best > peak, best, peak)
    tl.store(scores + request * tl.num_programs(1) + block, best)


@triton.jit(do_not_specialize=["blocks", "page_tokens", "table_row", "kept", "budget"])
def keep_blocks(scores, table, lengths, kept_table, kept_lengths, blocks: tl.int32, page_tokens: tl.int32,
                table_row: tl.int64, kept: tl.int32, budget: tl.int32, BLOCK: tl.constexpr):  # fmt: skip
    """Write the pages of the ``kept`` best blocks, in order, to ``kept_table``, and their tokens to ``kept_lengths``.

    The last block, where the query stands, is always kept; of equal scores the earlier block is better. A request of at
    most ``budget`` tokens keeps all.
    """
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    used = (length + page_tokens - 1) // page_tokens  # floor: up
    wanted = tl.where(length <= budget, used, tl.minimum(kept, used))
    written = tl.zeros([], tl.int32)
    for start in range(0, used, BLOCK):
        block = start + tl.arange(0, BLOCK)
        own = tl.load(scores + request * blocks + block, mask=block < used, other=float("-inf"))
        own = tl.where(block == used - 1, float("inf"), own)
        better = tl.zeros([BLOCK], tl.int32)
        for other_start in range(0, used, BLOCK):
            other = other_start + tl.arange(0, BLOCK)
            theirs = tl.load(scores + request * blocks + other, mask=other < used, other=float("-inf"))
            theirs = tl.where(other == used - 1, float("inf"), theirs)
            ahead = theirs[None, :] > own[:, None]
            tied = (theirs[None, :] == own[:, None]) & (other[None, :] < block[:, None])
            better += tl.sum(((ahead | tied) & (other < used)[None, :]).to(tl.int32), axis=1)
        chosen = (better < wanted) & (block < used)
        order = written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        slot = tl.load(table + request * table_row + block, mask=chosen, other=0)
        tl.store(kept_table + request * blocks + order, slot, mask=chosen)
        written += tl.sum(chosen.to(tl.int32), axis=0)
    last = length - (used - 1) * page_tokens
    tl.store(kept_lengths + request, tl.where(used == 0, 0, (written - 1) * page_tokens + last))
