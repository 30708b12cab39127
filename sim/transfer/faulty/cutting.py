"""Faults of mapping: the right entries, cut in the wrong places."""

from __future__ import annotations

from typing import Final

import msgspec

from ....model.formats import element_format
from ...finding import Finding
from ..declaration import RoleLayout
from ..mapping import common_heads, heads_of, map_entry, map_head_major
from ..matching import compare
from ..method import Held, Method, Piece
from ..planning import SOUND


def _in_elements_of_first_view(source: Held, destination: Held) -> list[Piece]:
    """Return pieces of the right number of elements, each as wide as those of the rank's first view."""
    first = element_format(source.registration.views[0].role_layout.format).bits
    own = element_format(source.role_layout.format).bits
    pieces = map_entry(source, destination)
    return [
        msgspec.structs.replace(piece, run_bytes=piece.run_bytes * first // own)  # floor: the fault itself
        for piece in pieces
    ]


def _head_major_always(source: Held, destination: Held) -> list[Piece]:
    """Return the pieces of a token-major page cut as if its heads came first."""
    one, other = source.role_layout, destination.role_layout
    if one.kind != "NHD":
        return map_entry(source, destination)
    mine, yours = heads_of(source), heads_of(destination)
    common = common_heads(mine, one, yours, other)
    return map_head_major(_as_head_major(one), _as_head_major(other), mine, yours, common)


def _as_head_major(layout: RoleLayout) -> RoleLayout:
    unit_bytes = layout.unit_bytes * (layout.page_tokens or 1)
    return msgspec.structs.replace(layout, kind="HND", unit_bytes=unit_bytes)


def _sections_as_one(source: Held, destination: Held) -> list[Piece]:
    """Return the one piece of a convolution state that is cut as a whole."""
    one, other = source.role_layout, destination.role_layout
    if one.kind != "SECTIONED":
        return map_entry(source, destination)
    mine, yours = source.entry.size_bytes, destination.entry.size_bytes
    first = max(one.shard_index * mine, other.shard_index * yours)
    end = min((one.shard_index + 1) * mine, (other.shard_index + 1) * yours)
    return [Piece(first - one.shard_index * mine, first - other.shard_index * yours, max(0, end - first))]


def _tokens_not_compared(source: Held, destination: Held) -> Finding | None:
    one, other = source.role_layout, destination.role_layout
    return compare(source, destination) if one.block_tokens == other.block_tokens else None


def _block_for_block(source: Held, destination: Held) -> list[Piece]:
    """Return the start of a block for the start of a block, however many tokens they have."""
    if source.role_layout.block_tokens == destination.role_layout.block_tokens:
        return map_entry(source, destination)
    return [Piece(0, 0, min(source.entry.size_bytes, destination.entry.size_bytes))]


CUTTING: Final[tuple[Method, ...]] = (
    msgspec.structs.replace(
        SOUND,
        name="fault:wire-typed-by-first-pool",
        summary="the wire counts elements and takes their width from the first pool, though pools differ in format",
        map=_in_elements_of_first_view,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:token-major-as-head-major",
        summary="pages whose tokens come first are cut as if their heads came first",
        map=_head_major_always,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:conv-state-as-one",
        summary="a convolution state is cut as a whole, though each of its sections is shared out on its own",
        map=_sections_as_one,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:block-for-block",
        summary="blocks are copied one for one, though the two sides put different numbers of tokens in a block",
        compare=_tokens_not_compared,
        map=_block_for_block,
    ),
)
"""Faults of mapping."""
