"""Faults of matching: the wrong layer, the wrong role, the wrong sender."""

from __future__ import annotations

from typing import Final

import msgspec

from ...finding import Finding
from ...layout import SIDE_PLANES, Layout
from ..declaration import Registration, RoleLayout
from ..mapping import map_entry
from ..matching import compare, sends, shards_meet
from ..method import Held, Method, Peers, Piece
from ..planning import SOUND
from ..registering import register


def _by_equal_division(source: Peers, destination: Peers, held: Held) -> tuple[Held, ...]:
    """Return the entries of the stage that would hold the layer if all stages held equally many."""
    each = max(1, source.layer_count // source.stage_count)  # floor: the fault itself
    stage = min(held.entry.layer // each, source.stage_count - 1)  # floor: likewise
    local = held.entry.layer - stage * each
    return _at_local_layer(source, held.entry.role, local, stage)


def _by_position(source: Peers, destination: Peers, held: Held) -> tuple[Held, ...]:
    """Return the entries at the same place of every stage's own list of layers."""
    return _at_local_layer(source, held.entry.role, held.entry.local_layer, None)


def _at_local_layer(source: Peers, role: str, local: int, stage: int | None) -> tuple[Held, ...]:
    return tuple(
        [
            Held(registration, view, entry)
            for registration in source.registrations
            if stage in (None, registration.stage)
            for view in registration.views
            for entry in view.entries
            if entry.role == role and entry.local_layer == local
        ]
    )


def _by_pool_number(source: Peers, destination: Peers, held: Held) -> tuple[Held, ...]:
    """Return the layer's entries at the same place of the pool with the same number, whatever their role."""
    layer, pool = held.entry.layer, held.view.pool
    place = [each.entry for each in _in_pool(held.registration, pool, layer)].index(held.entry)
    found = [_in_pool(registration, pool, layer) for registration in source.registrations]
    return tuple([entries[place] for entries in found if place < len(entries)])


def _in_pool(registration: Registration, pool: int, layer: int) -> list[Held]:
    """Return what a rank has of one layer in one pool, by offset."""
    found = [
        Held(registration, view, entry)
        for view in registration.views
        if view.pool == pool
        for entry in view.entries
        if entry.layer == layer
    ]
    return sorted(found, key=lambda each: each.entry.offset_bytes)


def _same_role_compared(source: Held, destination: Held) -> Finding | None:
    return compare(source, destination) if source.entry.role == destination.entry.role else None


def _what_fits(source: Held, destination: Held) -> list[Piece]:
    """Return the mapping of one role; between two, as many bytes as both have."""
    if source.entry.role == destination.entry.role:
        return map_entry(source, destination)
    return [Piece(0, 0, min(source.entry.size_bytes, destination.entry.size_bytes))]


def _meets(source: Held, destination: Held, destination_dp: int) -> bool:
    if source.entry.role == destination.entry.role:
        return sends(source, destination, destination_dp)
    return source.role_layout.replica_index == 0


def _heads_times_ranks(layout: Layout) -> Registration:
    """Return what a rank registers when it takes the heads per rank times the ranks for the heads of the model."""
    registration = register(layout)
    views = []
    for view in registration.views:
        shared = view.role_layout
        if shared.kind in ("HND", "NHD") and shared.page_tokens is not None:
            ranks = shared.shards * shared.replicas
            rank = shared.shard_index * shared.replicas + shared.replica_index
            changed: RoleLayout = msgspec.structs.replace(
                shared, shards=ranks, shard_index=rank, replicas=1, replica_index=0
            )
            view = msgspec.structs.replace(view, role_layout=changed)
        views.append(view)
    return msgspec.structs.replace(registration, views=tuple(views))


def _totals_not_compared(source: Held, destination: Held) -> Finding | None:
    """Compare nothing that follows from the number of heads, where blocks have equal tokens."""
    one, other = source.role_layout, destination.role_layout
    tokens = one.block_tokens, one.page_tokens
    alike = (one.kind, one.format, *tokens) == (other.kind, other.format, other.block_tokens, other.page_tokens)
    return None if alike and one.kind in ("HND", "NHD") else compare(source, destination)


def _every_replica_sends(source: Held, destination: Held, destination_dp: int) -> bool:
    return shards_meet(source.role_layout, destination.role_layout)


def _planes_not_compared(source: Held, destination: Held) -> Finding | None:
    packed = source.entry.role == destination.entry.role == SIDE_PLANES
    alike = source.role_layout.block_tokens == destination.role_layout.block_tokens
    return None if packed and alike else compare(source, destination)


def _as_much_as_fits(source: Held, destination: Held) -> list[Piece]:
    if source.entry.role == SIDE_PLANES:
        return [Piece(0, 0, min(source.entry.size_bytes, destination.entry.size_bytes))]
    return map_entry(source, destination)


PAIRING: Final[tuple[Method, ...]] = (
    msgspec.structs.replace(
        SOUND,
        name="fault:pp-equal-division",
        summary="a layer is looked for on the stage that would hold it if all pipeline stages were equally long",
        find=_by_equal_division,
        strict=False,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:layers-by-position",
        summary="layers are paired by their place in each stage's own list, not by their number in the model",
        find=_by_position,
        strict=False,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:role-by-pool-number",
        summary="a pool is taken for the peer's pool of the same number, whose roles depend on the heads per rank",
        find=_by_pool_number,
        compare=_same_role_compared,
        sends=_meets,
        map=_what_fits,
        strict=False,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:heads-times-ranks",
        summary="the model's heads are taken to be the heads per rank times the ranks, though heads are replicated",
        register=_heads_times_ranks,
        compare=_totals_not_compared,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:every-replica-sends",
        summary="every rank that holds a head sends it, so replicated heads arrive several times",
        sends=_every_replica_sends,
    ),
    msgspec.structs.replace(
        SOUND,
        name="fault:plane-as-far-as-it-fits",
        summary="packed planes of different sizes are copied as far as the smaller one goes",
        compare=_planes_not_compared,
        map=_as_much_as_fits,
    ),
)
"""Faults of matching."""
