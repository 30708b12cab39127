"""Memory is bounded before it is taken: ``fitted`` plans a layout, with fewer slots where its pools are too large."""

from __future__ import annotations

from typing import Final

from ..model.errors import SpecError
from ..sim.arena.fewer_slots import with_slots
from ..sim.layout import Layout
from .plan import Plan, plan_replay, pool_memory_bytes

DEFAULT_MAX_BYTES: Final = 256 << 20
"""Memory in bytes that one replayed layout takes at most, unless told otherwise; the same on every device."""


def layout_bytes(layout: Layout) -> int:
    """Return the bytes that the pools of ``layout`` take with their guard zones."""
    return sum([pool_memory_bytes(pool.size_bytes) for pool in layout.pools])


def fitted(layout: Layout, max_bytes: int = DEFAULT_MAX_BYTES) -> Plan:
    """Return the plan of ``layout``, or of ``layout`` with fewer slots, which its notes then say.

    Raises ``SpecError`` in one line where not even one slot of each pool fits.
    """
    needed = layout_bytes(layout)
    cut = layout
    while needed > max_bytes:
        slots = {
            (pool.manager, pool.group): pool.slot_count for pool in sorted(cut.pools, key=lambda pool: -pool.slot_count)
        }
        # at least halved where it is still too large, so that this ends
        fewer = {
            key: max(1, min(count * max_bytes // (needed + needed // 16), count - 1))  # floor: whole slots, a bit less
            for key, count in slots.items()
        }
        if fewer == slots:
            raise SpecError("layout", f"found pools of {needed} B with one slot each, needs at most {max_bytes} B")
        smaller = with_slots(layout, fewer, f"a replay in {max_bytes} B")
        now = layout_bytes(smaller)
        if now >= needed:
            raise SpecError("layout", f"found pools of {needed} B that cannot lose slots, needs at most {max_bytes} B")
        cut, needed = smaller, now
    return plan_replay(cut)
