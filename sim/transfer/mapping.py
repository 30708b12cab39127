"""Which bytes of an entry go where in the entry that stands for it, from what the two ranks registered alone.

Equal shards are one run; a finer shard lies inside each unit of a coarser one; token-major pages are cut per token,
sections one by one. Blocks of different tokens are cut into pieces of the smaller.
"""

from __future__ import annotations

from ...model.arithmetic import exact_div
from .declaration import RoleLayout
from .method import Held, Piece


def map_entry(source: Held, destination: Held) -> list[Piece]:
    """Return the pieces of ``source`` that belong into ``destination``."""
    one, other = source.role_layout, destination.role_layout
    if one.kind == "REPLICATED":
        return [Piece(0, 0, source.entry.size_bytes)]
    if one.kind == "SECTIONED":
        return map_sections(one, other)
    mine, yours = heads_of(source), heads_of(destination)
    common = common_heads(mine, one, yours, other)
    if one.kind == "NHD":
        return [map_token_major(one, other, mine, yours, common)]
    return map_head_major(one, other, mine, yours, common)


def heads_of(held: Held) -> int:
    """Return the heads that an entry holds on its rank."""
    layout = held.role_layout
    tokens = (layout.page_tokens or 1) if layout.kind == "NHD" else 1
    return exact_div(held.entry.size_bytes, layout.pages * tokens * layout.unit_bytes, "heads of an entry")


def common_heads(mine: int, one: RoleLayout, yours: int, other: RoleLayout) -> range:
    """Return the heads of the model that both shards hold."""
    first = max(one.shard_index * mine, other.shard_index * yours)
    end = min((one.shard_index + 1) * mine, (other.shard_index + 1) * yours)
    return range(first, max(first, end))


def map_head_major(one: RoleLayout, other: RoleLayout, mine: int, yours: int, common: range) -> list[Piece]:
    """Return the pieces of a page whose heads come first, in steps of the smaller kernel page."""
    heads = len(common)
    skipped = common.start - one.shard_index * mine, common.start - other.shard_index * yours
    if one.page_tokens is None or other.page_tokens is None:
        unit = one.unit_bytes
        return [Piece(skipped[0] * unit, skipped[1] * unit, heads * unit)]
    step = min(one.page_tokens, other.page_tokens)
    row = exact_div(one.unit_bytes, one.page_tokens, "bytes of one head's token")
    whole = max(one.pages * one.page_tokens, other.pages * other.page_tokens)
    pieces = []
    for token in range(0, whole, step):
        block, offset = place_of_token(one, mine, token, row)
        to_block, to_offset = place_of_token(other, yours, token, row)
        offset += skipped[0] * one.unit_bytes
        to_offset += skipped[1] * other.unit_bytes
        if one.page_tokens == other.page_tokens:
            pieces.append(Piece(offset, to_offset, heads * step * row, (), (), (), block, to_block))
        else:
            strides = (one.unit_bytes,), (other.unit_bytes,)
            pieces.append(Piece(offset, to_offset, step * row, (heads,), *strides, block, to_block))
    return pieces


def place_of_token(layout: RoleLayout, heads: int, token: int, row_bytes: int) -> tuple[int, int]:
    """Return the block that a token lies in, and where the first head's row of it starts inside the entry."""
    tokens = layout.page_tokens or 1
    block, inside = divmod(token, layout.pages * tokens)
    page, row = divmod(inside, tokens)
    return block, page * heads * layout.unit_bytes + row * row_bytes


def map_token_major(one: RoleLayout, other: RoleLayout, mine: int, yours: int, common: range) -> Piece:
    """Return the pieces of a page whose tokens come first: the common heads of each token."""
    unit = one.unit_bytes
    offset = (common.start - one.shard_index * mine) * unit
    to_offset = (common.start - other.shard_index * yours) * unit
    run = len(common) * unit
    tokens = one.pages * (one.page_tokens or 1)
    if mine == yours == len(common):
        return Piece(offset, to_offset, run * tokens)
    return Piece(offset, to_offset, run, (tokens,), (mine * unit,), (yours * unit,))


def map_sections(one: RoleLayout, other: RoleLayout) -> list[Piece]:
    """Return the pieces of sections that are shared out each on its own."""
    pieces = []
    start, to_start = 0, 0
    for size, to_size in zip(one.section_bytes, other.section_bytes, strict=True):
        first = max(one.shard_index * size, other.shard_index * to_size)
        end = min((one.shard_index + 1) * size, (other.shard_index + 1) * to_size)
        if end > first:
            offset = start + first - one.shard_index * size
            pieces.append(Piece(offset, to_start + first - other.shard_index * to_size, end - first))
        start += size
        to_start += to_size
    return pieces
