"""``Method``: how two sets of ranks match what they registered and map one onto the other.

A method is five functions, so that a faulty one (``faulty``) replaces the one that it gets wrong and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from ..finding import Finding
from ..layout import Layout
from .declaration import Entry, Registration, RoleLayout, View


class Held(msgspec.Struct, frozen=True, gc=False):
    """One entry of one rank, with its view and what the rank registered beside it."""

    registration: Registration
    view: View
    entry: Entry

    @property
    def role_layout(self) -> RoleLayout:
        """How the entry is shared out."""
        return self.view.role_layout


class Peers(msgspec.Struct, frozen=True):
    """What the ranks of one side registered, and how many layers and stages its model and pipeline have.

    ``by_name`` gives the entries of a (layer, role) over all ranks of the side, in rank order; an entry of a packed
    buffer is found under each of its layers.
    """

    name: str
    registrations: tuple[Registration, ...]
    by_name: dict[tuple[int, str], tuple[Held, ...]]
    layer_count: int
    stage_count: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes of one entry that go to one entry: ``run_bytes`` at a time, repeated along ``counts``.

    Offsets are relative to the two entries. ``source_block`` and ``destination_block`` are the blocks' numbers inside
    the smallest run of tokens that is a whole number of blocks on both sides.
    """

    source_offset: int
    destination_offset: int
    run_bytes: int
    counts: tuple[int, ...] = ()
    source_strides: tuple[int, ...] = ()
    destination_strides: tuple[int, ...] = ()
    source_block: int = 0
    destination_block: int = 0


Register: TypeAlias = Callable[[Layout], Registration]
Find: TypeAlias = Callable[[Peers, Peers, Held], tuple[Held, ...]]
Compare: TypeAlias = Callable[[Held, Held], Finding | None]
Sends: TypeAlias = Callable[[Held, Held, int], bool]
Map: TypeAlias = Callable[[Held, Held], list[Piece]]


class Method(msgspec.Struct, frozen=True):
    """One way of moving a cache.

    ``register`` says what a rank registers; ``find`` which entries of the source stand for an entry of the destination;
    ``compare`` refuses two entries that do not fit; ``sends`` says whether this replica of the source is the one that
    sends to that entry (for a destination of the given data-parallel rank); ``map`` which bytes go where.
    A method that is not ``strict`` leaves out in silence what has no counterpart.
    """

    name: str
    summary: str
    register: Register
    find: Find
    compare: Compare
    sends: Sends
    map: Map
    strict: bool = True
