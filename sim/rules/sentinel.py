"""Rule ``sentinel``: what the page table holds for a missing page reaches no live byte."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from .rule import Inspection, Rule, place_of


def check_sentinel(inspection: Inspection) -> Iterator[Finding]:
    """Yield page tables whose entries for a missing page can be dereferenced, or whose lanes disagree about it."""
    layout = inspection.layout
    for table in layout.tables:
        lanes = table.missing_lanes
        if not lanes or all(index < 0 for index in lanes):
            continue
        if table.missing_guard == "length" and len(set(lanes)) == 1:
            continue  # every lane holds the same placeholder, and readers and writers stop at the sequence length
        names = ("K", "V")
        reached = next(lane for lane, index in enumerate(lanes) if index >= 0)
        slot, page = divmod(lanes[reached], max(1, table.index_scale))
        where = tuple([place_of(layout, key, slot=slot) for key in table.key_buffers[:1]])
        guard = {None: "nothing keeps consumers from it", "negative": "consumers skip negative indices only"}.get(
            table.missing_guard, "its lanes differ, so one length mask cannot cover them"
        )
        yield Finding(
            rule="sentinel",
            message="a missing page has indices "
            f"{', '.join(f'{names[lane]} {index}' for lane, index in enumerate(lanes))} in the page table: "
            f"{names[reached]} index {lanes[reached]} is page {page} of slot {slot}, which a request may own, "
            f"and {guard}",
            remedy="keep the index invalid in every lane, or reserve the page that it points at",
            where=where,
        )


RULE = Rule(
    "sentinel",
    "the table entries of a missing page reach no live byte",
    "A block table has entries for pages that a sequence does not hold. They must stay invalid in every lane, or "
    "hold one placeholder in all lanes that every consumer masks by the sequence length. Adding one to the invalid "
    "index for V makes it page 0, which belongs to whoever owns slot 0.",
    check_sentinel,
)
