"""Which entry stands for which, and whether the two fit.

Entries are matched by the layer's number in the model and by role, never by pool or by position. Two that match must
agree on kind, format, heads, units, sections and tokens, and their shards must divide one another. A mismatch is
refused with both sides, both values and the way out, and nothing is copied in part. ``docs/peers.md`` lists the checks.
"""

from __future__ import annotations

from ..finding import Finding, Where
from ..layout import SIDE_PLANES
from .declaration import Registration, RoleLayout
from .method import Held, Peers


def peers_of(name: str, registrations: tuple[Registration, ...], layer_count: int, stage_count: int) -> Peers:
    """Return one side's registrations with their entries by layer and role."""
    found: dict[tuple[int, str], list[Held]] = {}
    for registration in registrations:
        for view in registration.views:
            for entry in view.entries:
                held = Held(registration, view, entry)
                for layer in entry.layers:
                    found.setdefault((layer, entry.role), []).append(held)
    by_name = {key: tuple(entries) for key, entries in found.items()}
    return Peers(name, registrations, by_name, layer_count, stage_count)


def find_by_name(source: Peers, destination: Peers, held: Held) -> tuple[Held, ...]:
    """Return the source's entries of the same role that hold any layer of ``held``, over all ranks."""
    if len(held.entry.layers) == 1:
        return source.by_name.get((held.entry.layers[0], held.entry.role), ())
    found: dict[int, Held] = {}
    for layer in held.entry.layers:
        for candidate in source.by_name.get((layer, held.entry.role), ()):
            found[id(candidate)] = candidate
    return tuple(found.values())


def compare(source: Held, destination: Held) -> Finding | None:
    """Return why two entries of one name do not fit, None when they do."""
    if source.entry.role == SIDE_PLANES:
        packed = _compare_packed(source, destination)
        if packed is not None:
            return packed
    one, other = source.role_layout, destination.role_layout
    for what, mine, yours, rule, remedy in (
        ("kind", one.kind, other.kind, "record-layout", "give both sides one axis order inside a page (--kv-layout)"),
        ("element format", one.format, other.format, "record-layout", "give both sides one KV and state dtype"),
        (
            "bytes over all shards",
            source.entry.size_bytes * one.shards,
            destination.entry.size_bytes * other.shards,
            "peer",
            "serve the same model on both sides",
        ),
    ):
        if what.startswith("bytes") and one.page_tokens != other.page_tokens:
            continue  # compared per token below
        if mine != yours:
            return _refusal(rule, source, destination, what, mine, yours, remedy)
    if max(one.shards, other.shards) % min(one.shards, other.shards):
        remedy = "choose tensor-parallel sizes of which one divides the other"
        return _refusal("head-map", source, destination, "shards", one.shards, other.shards, remedy)
    return _compare_tokens(source, destination) or _compare_units(source, destination) or _windows(source, destination)


def _compare_tokens(source: Held, destination: Held) -> Finding | None:
    """Compare tokens per block and per kernel page: equal, or divisible where pages are head-major."""
    one, other = source.role_layout, destination.role_layout
    for what, mine, yours in (
        ("tokens per kernel page", one.page_tokens, other.page_tokens),
        ("tokens per block", one.block_tokens, other.block_tokens),
    ):
        if mine == yours:
            continue
        if mine is None or yours is None:
            return _refusal("peer", source, destination, what, mine, yours, "keep the role per token on both sides")
        if one.kind == "HND" and not max(mine, yours) % min(mine, yours):
            continue
        remedy = "give both sides the same tokens per block"
        if one.kind == "HND":
            remedy += ", or multiples of one another"
        return _refusal("peer", source, destination, what, mine, yours, remedy)
    return None


def _compare_units(source: Held, destination: Held) -> Finding | None:
    """Compare what one head takes (of one token where there are tokens), all heads, and the sections' totals."""
    one, other = source.role_layout, destination.role_layout
    same_model = "serve the same model on both sides"
    if one.kind in ("HND", "NHD"):
        mine, yours = _head_bytes(one), _head_bytes(other)
        if mine[0] * yours[1] != yours[0] * mine[1]:
            return _refusal("record-layout", source, destination, "unit bytes", mine[0], yours[0], same_model)
        heads = _heads(source), _heads(destination)
        if heads[0] != heads[1]:
            return _refusal("head-map", source, destination, "heads over all shards", *heads, same_model)
    mine_whole, yours_whole = (tuple([size * each.shards for size in each.section_bytes]) for each in (one, other))
    if mine_whole != yours_whole:
        remedy = "keep the sections of the convolution in one order and size"
        what = "section bytes over all shards"
        return _refusal("record-layout", source, destination, what, mine_whole, yours_whole, remedy)
    return None


def _windows(source: Held, destination: Held) -> Finding | None:
    mine, yours = (held.registration.life_cycles[held.view.life_cycle].window for held in (source, destination))
    if mine == yours:
        return None
    remedy = "give both sides one longest sequence, so that windows are clipped alike"
    return _refusal("peer", source, destination, "window in tokens", mine, yours, remedy)


def _head_bytes(role_layout: RoleLayout) -> tuple[int, int]:
    """Return what one head takes, and of how many tokens."""
    return role_layout.unit_bytes, (role_layout.page_tokens or 1) if role_layout.kind == "HND" else 1


def _heads(held: Held) -> int:
    layout = held.role_layout
    per_head = layout.pages * layout.unit_bytes * (1 if layout.kind == "HND" else layout.page_tokens or 1)
    return held.entry.size_bytes * layout.shards // per_head  # floor: the unit divides the bytes, it was made so


def _compare_packed(source: Held, destination: Held) -> Finding | None:
    """Refuse packed planes of different layers: their size is a matter of the layers that are local."""
    mine, yours = source.entry, destination.entry
    if mine.layers == yours.layers and (
        mine.size_bytes == yours.size_bytes or source.role_layout.block_tokens != destination.role_layout.block_tokens
    ):
        return None  # tokens are compared below, as those of any other role
    return Finding(
        rule="peer",
        message=f"the packed {SIDE_PLANES} differ: the source's rank {source.registration.rank} packs "
        f"{_layers(mine.layers)} into {mine.size_bytes} B, the destination's rank "
        f"{destination.registration.rank} packs {_layers(yours.layers)} into "
        f"{yours.size_bytes} B; a packed plane is one entry that holds all local layers",
        remedy="give both sides one pipeline split, or register side planes layer by layer",
        where=(_where(source), _where(destination)),
    )


def _layers(layers: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, layers[:4])) + (", ..." if len(layers) > 4 else "")
    return f"{len(layers)} local sparse layer{'s' if len(layers) != 1 else ''} ({listed})"


def _refusal(
    rule: str, source: Held, destination: Held, what: str, mine: object, yours: object, remedy: str
) -> Finding:
    entry = source.entry
    return Finding(
        rule=rule,
        message=f"layer {entry.layer}'s {entry.role} differs in {what}: {_value(mine)} on the source's rank "
        f"{source.registration.rank}, {_value(yours)} on the destination's rank {destination.registration.rank}",
        remedy=remedy,
        where=(_where(source), _where(destination)),
    )


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return " + ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _where(held: Held) -> Where:
    cycle = held.registration.life_cycles[held.view.life_cycle]
    return Where(manager=cycle.manager, layer=held.entry.layer, role=held.entry.role, pool=held.view.pool)


def sends(source: Held, destination: Held, destination_dp: int) -> bool:
    """Whether this rank of the source sends to that rank of the destination: its shard is wanted, and its turn.

    With more replicas than the destination has, each of the destination's replicas has a group of senders, and which
    of them sends depends on the destination's data-parallel rank, so that the load is spread.
    """
    one, other = source.role_layout, destination.role_layout
    if not shards_meet(one, other):
        return False
    if one.replicas < other.replicas:
        turn = other.replica_index * one.replicas // other.replicas  # floor: whose group a replica stands in
    else:
        ratio = one.replicas // other.replicas  # floor: senders per replica; those left over never send
        turn = other.replica_index * ratio + destination_dp % ratio
    return one.replica_index == turn


def shards_meet(one: RoleLayout, other: RoleLayout) -> bool:
    """Whether two shards of one role have heads or channels in common."""
    first, second = one.shard_index * other.shards, other.shard_index * one.shards
    return first < second + one.shards and second < first + other.shards
