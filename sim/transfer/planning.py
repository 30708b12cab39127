"""``plan_transfer``: from the layouts of two sets of ranks to a ``Plan``.

Every entry of every rank of the destination is looked for at the source. What is missing on either side, and what does
not fit, is refused before anything moves; alike refusals are told once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...model.arithmetic import InexactDivision, exact_div
from ..finding import Finding, Where
from ..layout import KEY, KEY_SCALE, SIDE_PLANES, VALUE, VALUE_SCALE, Layout
from ..rejection import Rejected
from .declaration import RoleLayout
from .mapping import map_entry
from .matching import compare, find_by_name, peers_of, sends
from .method import Held, Method, Peers, Piece
from .plan import Copy, Plan, merged
from .registering import register

SOUND = Method(
    "transfer",
    "matches by layer and role, refuses what does not fit, and moves each byte once",
    register,
    find_by_name,
    compare,
    sends,
    map_entry,
)
"""The method that TensorRT-LLM's Python transceiver is described by (``docs/trtllm.md``)."""


def plan_transfer(
    source: Sequence[Layout],
    destination: Sequence[Layout],
    *,
    method: Method = SOUND,
    destination_dp: int = 0,
) -> Plan:
    """Return how the cache of one request moves from the ranks of ``source`` to those of ``destination``.

    Each side lists the layouts of all ranks that hold the request: all tensor-parallel ranks of all stages, or under
    attention-DP one rank of each stage. ``destination_dp`` is the destination's attention-DP rank. Never raises for a
    pair that does not fit: the plan then holds refusals instead of copies.
    """
    sides: list[Peers] = []
    for name, layouts in (("source", source), ("destination", destination)):
        try:
            registrations = tuple([method.register(layout) for layout in layouts])
        except (Rejected, InexactDivision) as error:
            remedy = error.remedy if isinstance(error, Rejected) else "store whole heads, tokens and elements"
            where = error.where if isinstance(error, Rejected) else ()
            message = f"the {name} cannot register its cache: {error}"
            return Plan(refusals=(Finding(rule="peer", message=message, remedy=remedy, where=where),))
        spec = layouts[0].spec
        layers = 0 if spec is None else len(spec.layers)
        sides.append(peers_of(name, registrations, layers, 1 if spec is None else spec.parallel.pp))
    return _planned(sides[0], sides[1], method, destination_dp)


def _planned(source: Peers, destination: Peers, method: Method, destination_dp: int) -> Plan:
    refusals: dict[tuple[str, str], Finding] = {}
    compared: dict[tuple[object, ...], Finding | None] = {}
    mapped: dict[tuple[object, ...], list[Piece]] = {}
    copies: list[Copy] = []
    missing: list[Held] = []
    for registration in destination.registrations:
        for view in registration.views:
            for entry in view.entries:
                held = Held(registration, view, entry)
                candidates = method.find(source, destination, held)
                if not candidates:
                    missing.append(held)
                for candidate in candidates:
                    key = _class_of(candidate, held)
                    if key not in compared:
                        compared[key] = method.compare(candidate, held)
                    refusal = compared[key]
                    if refusal is not None:
                        refusals.setdefault((entry.role, _alike(refusal)), refusal)
                    elif method.sends(candidate, held, destination_dp):
                        if key not in mapped:
                            mapped[key] = method.map(candidate, held)
                        copies += _copies(candidate, held, mapped[key])
    absent = _missing(missing, source, destination) if method.strict else []
    if refusals or absent:
        return Plan(refusals=(*refusals.values(), *absent))
    return Plan(copies=merged(copies))


def _class_of(source: Held, destination: Held) -> tuple[object, ...]:
    """Return what a comparison and a mapping of two entries depend on."""
    sizes = (source.entry.size_bytes, destination.entry.size_bytes)
    windows = tuple([held.registration.life_cycles[held.view.life_cycle].window for held in (source, destination)])
    if source.entry.parts or destination.entry.parts:
        return source.entry.layers, destination.entry.layers, source.view.role_layout, destination.role_layout, sizes
    return source.entry.role, source.view.role_layout, destination.view.role_layout, sizes, windows


def _alike(refusal: Finding) -> str:
    """Return what of a refusal tells it from alike ones: the text without the numbers of ranks and of one layer."""
    return re.sub(r"\b(rank|layer) \d+", r"\1", refusal.message)


def _copies(source: Held, destination: Held, pieces: list[Piece]) -> list[Copy]:
    one, other = source.role_layout, destination.role_layout
    source_blocks, destination_blocks = _blocks(one, other)
    name = f"layer {destination.entry.layer} {destination.entry.role}"
    return [
        Copy(
            source.registration.rank,
            source.view.pool,
            source.view.life_cycle,
            source.view.slot_stride_bytes,
            source.entry.offset_bytes + piece.source_offset,
            destination.registration.rank,
            destination.view.pool,
            destination.view.life_cycle,
            destination.view.slot_stride_bytes,
            destination.entry.offset_bytes + piece.destination_offset,
            piece.run_bytes,
            piece.counts,
            piece.source_strides,
            piece.destination_strides,
            piece.source_block,
            piece.destination_block,
            source_blocks,
            destination_blocks,
            name,
        )
        for piece in pieces
        if piece.run_bytes
    ]


def _blocks(one: RoleLayout, other: RoleLayout) -> tuple[int, int]:
    """Return how many blocks of each side hold the same tokens."""
    mine, yours = one.block_tokens, other.block_tokens
    if mine is None or yours is None or mine == yours:
        return 1, 1
    whole = max(mine, yours)
    if whole % min(mine, yours):
        return 1, 1  # only a method that does not compare gets here
    return exact_div(whole, mine, "blocks of the source"), exact_div(whole, yours, "blocks of the destination")


def _missing(wanted: list[Held], source: Peers, destination: Peers) -> list[Finding]:
    """Return what the destination has and the source lacks, and the other way round, once for each role."""
    findings = _absent(wanted, "destination", "source", source)
    surplus: dict[int, Held] = {}
    fed_roles = {role for _, role in destination.by_name}
    destination_layers = {layer for layer, _ in destination.by_name}
    for (layer, role), helds in source.by_name.items():
        if (layer, role) in destination.by_name:
            continue
        first = helds[0]
        lacks_packing = role == SIDE_PLANES and role not in fed_roles
        once = first.entry.per_rank and role in fed_roles and layer in destination_layers
        if lacks_packing or (role != SIDE_PLANES and not once):
            surplus[id(first)] = first
    return findings + _absent(list(surplus.values()), "source", "destination", destination)


def _absent(helds: list[Held], side: str, other: str, others: Peers) -> list[Finding]:
    by_role: dict[str, list[Held]] = {}
    for held in helds:
        by_role.setdefault(held.entry.role, []).append(held)
    their_layers = {layer for layer, _ in others.by_name}
    findings = []
    for role, entries in by_role.items():
        layers = sorted({layer for held in entries for layer in held.entry.layers})
        whole = [layer for layer in layers if layer not in their_layers]
        first = entries[0]
        where = (Where(layer=first.entry.layer, role=role, pool=first.view.pool),)
        listed = ", ".join(map(str, layers[:4])) + (", ..." if len(layers) > 4 else "")
        size = f"{first.entry.size_bytes} B a slot on rank {first.registration.rank}"
        if whole:
            message = f"the {side} holds {role} of layers {listed} ({size}), and no rank of the {other} holds "
            message += f"layer {whole[0]}"
            remedy = "serve the same model, draft layers included, on both sides"
            findings.append(Finding(rule="layer-map", message=message, remedy=remedy, where=where))
            continue
        there = sorted({name for layer, name in others.by_name if layer in layers} - _SHARED_BY_HEADS - {role})
        message = f"the {side} registers {role} of layers {listed} ({size}), and the {other} registers none of it "
        message += f"for these layers but {', '.join(there) or 'nothing beside K and V'}"
        remedy = (
            "let both sides decide alike which roles they register and whether side planes are packed: from facts of "
            "the whole model, as trtllm-v2-qsa-packed does"
        )
        findings.append(Finding(rule="peer", message=message, remedy=remedy, where=where))
    return findings


_SHARED_BY_HEADS = {KEY, VALUE, KEY_SCALE, VALUE_SCALE}


def bytes_moved(plan: Plan) -> int:
    """Return the bytes that one block of the longer side (and one state) moves, over all ranks."""
    return sum(copy.size_bytes for copy in plan.copies)
