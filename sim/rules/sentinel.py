"""Rule ``sentinel``: what the page table holds for a missing page reaches no live byte."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import Layout, PageTable
from .rule import Inspection, Rule, place_of


def check_sentinel(inspection: Inspection) -> Iterator[Finding]:
    """Yield page tables whose entries for a missing page can be dereferenced, or whose lanes disagree about it."""
    for table in inspection.layout.tables:
        if reachable_lane(table) is not None:
            yield sentinel_finding(inspection.layout, table)


def reachable_lane(table: PageTable) -> int | None:
    """Return the first lane whose index of a missing page a consumer may follow, or None."""
    lanes = table.missing_lanes
    if table.missing_guard == "length" and len(set(lanes)) == 1:
        return None  # every lane holds the same placeholder, and readers and writers stop at the sequence length
    return next((lane for lane, index in enumerate(lanes) if index >= 0), None)


def sentinel_finding(layout: Layout, table: PageTable) -> Finding:
    """Return that ``table``, which has a reachable lane, lets a missing page be followed to a live one."""
    lanes, names = table.missing_lanes, ("K", "V")
    reached = reachable_lane(table) or 0
    slot, page = divmod(lanes[reached], max(1, table.index_scale))
    guard = {None: "nothing keeps consumers from it", "negative": "consumers skip negative indices only"}.get(
        table.missing_guard, "its lanes differ, so one length mask cannot cover them"
    )
    return Finding(
        rule="sentinel",
        message="a missing page has indices "
        f"{', '.join(f'{names[lane]} {index}' for lane, index in enumerate(lanes))} in the page table: "
        f"{names[reached]} index {lanes[reached]} is page {page} of slot {slot}, which a request may own, "
        f"and {guard}",
        remedy="keep the index invalid in every lane, or reserve the page that it points at",
        where=tuple([place_of(layout, key, slot=slot) for key in table.key_buffers[:1]]),
    )


RULE = Rule(
    "sentinel",
    "the table entries of a missing page reach no live byte",
    "A block table has entries for pages that a sequence does not hold. They must stay invalid in every lane, or "
    "hold one placeholder in all lanes that every consumer masks by the sequence length. Adding one to the invalid "
    "index for V makes it page 0, which belongs to whoever owns slot 0.",
    check_sentinel,
)
