"""What a replay saw, as findings: the rules and the words of the static check, with the bytes that memory held."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..sim.arena.findings import MEMORY_RULES, bounds_findings
from ..sim.arena.memory import PoolMemory
from ..sim.arena.owners import PoolOwners
from ..sim.arena.reached import op_address_finding, trespass_findings
from ..sim.arena.shared import alias_findings, owner_name, shared_elements
from ..sim.arena.views import holds
from ..sim.finding import Finding
from ..sim.rules.int32 import offset_finding
from ..sim.rules.rule import pool_name
from ..sim.rules.sentinel import sentinel_finding
from .alone import Stray
from .plan import Plan
from .seen import Misread, Seen

MAX_TRESPASS_BYTES = 64 << 20
"""Pools up to this size are searched, on the host, for whom a stray access hits."""


def replay_findings(
    plan: Plan, seen: Seen, strays: dict[int, Stray], narrow: dict[int, int], limit: int
) -> list[Finding]:
    """Return at most ``limit`` findings of each rule.

    ``seen`` is what the plan showed when it was carried out in order, ``strays`` how accesses stray (by place), and
    ``narrow`` how many bytes consumers with 32-bit offsets read wrong.
    """
    found: dict[str, list[Finding]] = {rule: [] for rule in MEMORY_RULES}
    for finding in _all(plan, seen, strays, narrow):
        if len(found[finding.rule]) < limit:
            found[finding.rule].append(finding)
    return [finding for rule in found.values() for finding in rule]


def _all(plan: Plan, seen: Seen, strays: dict[int, Stray], narrow: dict[int, int]) -> Iterator[Finding]:
    """Yield everything, pool by pool in the order of the arena."""
    layout = plan.layout
    yield from bounds_findings(layout)
    yield from shared_elements(layout)
    for pool in range(len(layout.pools)):
        owners = PoolOwners(plan.table, pool, max(0, layout.pools[pool].size_bytes))
        yield from _shared(plan, seen, owners)
        yield from _reached(plan, strays, owners)
        yield from _missing(plan, seen, pool)
    yield from _narrow(plan, narrow)
    yield from _mismatches(plan, seen)


def _shared(plan: Plan, seen: Seen, owners: PoolOwners) -> Iterator[Finding]:
    """Yield the pairs of owners that share bytes of one pool, each with what a shared byte held."""
    misread: dict[int, tuple[int, Misread]] = {}
    lowest_by_round: list[dict[int, tuple[int, int]]] = []
    for by_owner in seen.owners:
        lowest: dict[int, tuple[int, int]] = {}
        for owner, found in by_owner.items():
            view = plan.table.owners[owner].view
            if view.pool == owners.pool:
                slots = holds(view, owners.size_bytes, found.byte)
                lowest[owner] = (found.byte, _slot(plan, seen, owner, found, slots))
                misread.setdefault(found.byte, (owner, found))
        lowest_by_round.append(dict(sorted(lowest.items())))
    for finding in alias_findings(plan.layout, owners, lowest_by_round):
        byte = finding.where[0].first_byte
        owner, found = misread[byte if byte is not None else -1]
        name = owner_name(plan.layout, plan.table.owners[owner])
        seen_there = f"; memory held {found.held} there after {name} wrote {found.expected}"
        yield msgspec.structs.replace(finding, message=finding.message + seen_there)


def _slot(plan: Plan, seen: Seen, owner: int, found: Misread, slots: list[int]) -> int:
    """Return the slot of ``slots`` whose cell should have held what was expected; the first one where all should."""
    for rounds in plan.table.rounds:
        for stamps in rounds:
            for stamp in stamps:
                if stamp.owner == owner:
                    for slot in slots:
                        number = stamp.first_number + slot
                        if found.expected in number.to_bytes(plan.table.digits, "little"):
                            return slot
    return slots[0]


def _reached(plan: Plan, strays: dict[int, Stray], owners: PoolOwners) -> Iterator[Finding]:
    """Yield the accesses to one pool that stray, and whom they hit."""
    layout = plan.layout
    memory: PoolMemory | None = None
    for index, access in enumerate(layout.accesses):
        stray = strays.get(index)
        if access.pool != owners.pool or stray is None:
            continue
        finding = op_address_finding(layout, owners, access, stray.slot, stray.reached)
        if stray.byte is not None:
            seen_there = (
                f"; memory held {stray.held} in byte {stray.byte}, where its own storage holds {stray.expected}"
            )
            finding = msgspec.structs.replace(finding, message=finding.message + seen_there)
        yield finding
        if owners.size_bytes <= MAX_TRESPASS_BYTES:
            memory = memory or PoolMemory(layout, plan.table, owners.pool)
            yield from trespass_findings(layout, memory, access)


def _missing(plan: Plan, seen: Seen, pool: int) -> Iterator[Finding]:
    """Yield the page tables whose missing pages lead to bytes of ``pool`` that their owners had written."""
    for index in sorted(seen.missing):
        table = plan.layout.tables[index]
        if table.pool == pool:
            finding = sentinel_finding(plan.layout, table)
            yield msgspec.structs.replace(finding, message=f"{finding.message}; memory held what an owner wrote there")


def _narrow(plan: Plan, narrow: dict[int, int]) -> Iterator[Finding]:
    """Yield the accesses of consumers with 32-bit offsets that read wrong bytes."""
    spec = plan.layout.spec
    for index, wrong in sorted(narrow.items()):
        access = plan.layout.accesses[index]
        last = access.offset_bytes + (access.cell_count - 1) * access.pitch_bytes + access.page.span_bytes - 1
        finding = offset_finding(plan.layout, access, last, spec.consumer.offset_bits if spec is not None else 32)
        message = f"{finding.message}; with offsets that wrap, memory gave {wrong} wrong bytes"
        yield msgspec.structs.replace(finding, message=message)


def _mismatches(plan: Plan, seen: Seen) -> Iterator[Finding]:
    """Yield where memory and the arena's prediction disagree, or the two ways of reading."""
    layout = plan.layout
    remedy = "report this case: the simulator and the memory it was replayed on disagree"
    for pool, byte, held, predicted in seen.mismatches:
        size = layout.pools[pool].size_bytes
        place = f"byte {byte} of {pool_name(layout.pools[pool])}"
        if not 0 <= byte < size:
            place += f" ({'before' if byte < 0 else 'after'} its {size} B, in the guard zone)"
        what = "holds something else than" if held < 0 else f"holds {held}, not {predicted} as in"
        message = f"{place} {what} the arena's prediction after its owners wrote"
        yield Finding(rule="replay-mismatch", message=message, remedy=remedy)
    for number, owner in seen.second:
        name = owner_name(layout, plan.table.owners[owner])
        message = f"two ways of reading {name} back in round {number} disagree on whether its bytes are right"
        yield Finding(rule="replay-mismatch", message=message, remedy=remedy)
