"""``Record``: one thing that a trace does to memory, plain enough for any executor; and the executor on NumPy bytes.

A record touches one run of bytes. ``fill`` writes one byte value, ``write`` the bytes of an owner number, ``copy``
takes what lies elsewhere, and ``read`` states what must be there. The value of an owned byte is digit ``d`` (base 256)
of its owner number, in a run that stamps digit ``d``: a few runs tell all owners apart, one tells most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Space: TypeAlias = Literal["device", "host"]
Memory: TypeAlias = dict[tuple[Space, int], NDArray[np.uint8]]
"""The bytes of every pool of the device, and of every group's host tier."""

FRESH_BYTE: Final = 0xCB
FREED_BYTE: Final = 0xFD
CLEARED_BYTE: Final = 0x00


class Record(msgspec.Struct, frozen=True):
    """One run of ``bytes`` bytes at ``offset_bytes`` of ``pool`` (of group ``pool`` where ``space`` is ``host``).

    ``operation`` counts from 0 in the trace. ``owner`` is the owner number of a ``write`` or ``read``, the byte value
    of a ``fill``, and unused in a ``copy``, whose source is the last three fields. ``view`` says whose address formula
    the run comes from: the ``writer``'s, the ``reader``'s, or the ``storage``'s own.
    """

    operation: int
    kind: Literal["fill", "write", "read", "copy"]
    space: Space
    pool: int
    offset_bytes: int
    bytes: int
    owner: int = 0
    view: Literal["writer", "reader", "storage"] = "storage"
    source_space: Space = "device"
    source_pool: int = 0
    source_offset_bytes: int = 0


def digit_of(owner: int, digit: int) -> int:
    """Return the value that a byte of ``owner`` has in a run that stamps ``digit``."""
    return owner >> 8 * digit & 0xFF


def execute(records: Iterable[Record], memory: Memory, digit: int = 0) -> list[Record]:
    """Apply ``records`` in order to ``memory``; return the reads that found other bytes than they state."""
    wrong = []
    for record in records:
        place = slice(record.offset_bytes, record.offset_bytes + record.bytes)
        held = memory[record.space, record.pool]
        if record.kind == "fill":
            held[place] = record.owner
        elif record.kind == "write":
            held[place] = digit_of(record.owner, digit)
        elif record.kind == "copy":
            source = record.source_offset_bytes
            held[place] = memory[record.source_space, record.source_pool][source : source + record.bytes].copy()
        elif (held[place] != digit_of(record.owner, digit)).any():
            wrong.append(record)
    return wrong
