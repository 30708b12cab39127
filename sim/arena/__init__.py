"""The byte arena: a layout on NumPy bytes, with an owner for every byte.

    arena = Arena.build(layout)
    arena.findings()                      # what the static rules bounds, alias and op-address say, seen on memory
    arena.predicted_bytes(0, pool=0)      # what pool 0 holds after the first pass, padding included
    arena.digest()                        # one number to compare with a replay on other memory

Importing this package imports numpy; nothing that ``check`` needs imports this package.
"""

from __future__ import annotations

from .arena import DEFAULT_MAX_BYTES, Arena, arena_findings
from .fewer_slots import arena_bytes, with_fewer_slots
from .owners import Owner, OwnerTable, Stamp, owner_table
from .views import ByteView

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Arena",
    "ByteView",
    "Owner",
    "OwnerTable",
    "Stamp",
    "arena_bytes",
    "arena_findings",
    "owner_table",
    "with_fewer_slots",
]
