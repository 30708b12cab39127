"""Rule ``budget``: the estimate that sizes the cache equals what is laid out, and pools hold nothing unaccounted
for."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding, Where
from ..layout import Layout
from ..page import data_bytes
from .rule import Inspection, Rule, buffer_name, pool_name


def check_budget(inspection: Inspection) -> Iterator[Finding]:
    """Yield estimates that differ from the bytes laid out, slots that are not filled, and pools beyond the quota."""
    layout = inspection.layout
    laid_out: dict[str, int] = {}
    used: dict[tuple[int, int], int] = {}
    for buffer in layout.buffers:
        at = buffer.pool, buffer.life_cycle
        used[at] = used.get(at, 0) + buffer.page_bytes
        if not layout.life_cycles[buffer.life_cycle].recurrent:
            laid_out[buffer.manager] = laid_out.get(buffer.manager, 0) + buffer.page_bytes
    for manager, estimate in layout.block_bytes:
        found = laid_out.get(manager, 0)
        if found != estimate:
            yield Finding(
                rule="budget",
                message=f"the {manager} manager is sized for {estimate} B per block of tokens, and a block takes "
                f"{found} B",
                remedy="count every registered buffer in the cost model, side planes and block scales too",
                where=(Where(manager=manager),),
            )
    largest: dict[int, int] = {}
    for (pool_index, _), taken in used.items():
        largest[pool_index] = max(largest.get(pool_index, 0), taken)
    for index, pool in enumerate(layout.pools):
        taken = largest.get(index, 0)
        if taken + pool.padding_bytes != pool.slot_bytes:
            yield Finding(
                rule="budget",
                message=f"a slot of {pool_name(pool)} has {pool.slot_bytes} B, and its buffers take {taken} B with "
                f"{pool.padding_bytes} B of declared padding",
                remedy="size slots as the sum of their buffers, and declare padding" + _scattered(layout, index),
                where=(Where(manager=pool.manager, group=pool.group, pool=pool.index),),
            )
    quota = layout.spec.quota_bytes if layout.spec is not None else None
    total = sum([pool.size_bytes for pool in layout.pools])
    if quota is not None and total > quota:
        yield Finding(
            rule="budget",
            message=f"all pools together take {total} B, and the quota is {quota} B",
            remedy="split the quota so that every pool, with its rounding, stays inside it",
        )


def _scattered(layout: Layout, pool: int) -> str:
    """Return a hint where a page with gaps, in which others may lie, is counted with its gaps."""
    for buffer in layout.buffers:
        own = data_bytes(buffer.page)
        if buffer.pool == pool and not buffer.page.dense and buffer.page_bytes == buffer.page.span_bytes > own:
            name = buffer_name(buffer)
            return f"; if other pages lie between the elements of {name}, its page_bytes are its own {own} B alone"
    return ""


RULE = Rule(
    "budget",
    "the estimate that sizes the cache equals what is laid out",
    "Engines compute how many tokens fit from a cost model of bytes per token and layer. It must equal what the "
    "layout really takes per block, with side planes, block scales and padding heads counted; otherwise the cache is "
    "too small for the requests that were admitted, or memory is wasted. Slots hold their buffers and declared "
    "padding, no more, and all pools stay inside the quota.",
    check_budget,
)
