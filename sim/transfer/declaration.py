"""What a rank tells its peers of its cache: views of its pools, cut by role, and how each role is shared out.

A view is what a rank registers of one pool for roles that are shared out alike. Peers see these numbers and nothing
else of each other: whatever they move follows from them (see ``docs/peers.md``).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..layout import LifeCycle, Part

Kind: TypeAlias = Literal["HND", "NHD", "REPLICATED", "SECTIONED"]


class RoleLayout(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """How one role of a rank is shared out, and in which order its bytes lie.

    ``kind``: head-major (HND), token-major (NHD), the same on every rank (REPLICATED), or several sections that are
    each shared out on their own (SECTIONED, ``section_bytes`` on this rank). ``unit_bytes`` is what one head takes: of
    a kernel page (HND), of one token (NHD); 0 for the other kinds. A block holds ``pages`` kernel pages of
    ``page_tokens`` tokens; states have one page and no tokens (None). This rank holds shard ``shard_index`` of
    ``shards``, and is replica ``replica_index`` of ``replicas`` that hold the same.
    """

    kind: Kind
    shards: int
    shard_index: int
    replicas: int
    replica_index: int
    unit_bytes: int
    section_bytes: tuple[int, ...]
    format: str
    pages: int = 1
    page_tokens: int | None = None

    @property
    def block_tokens(self) -> int | None:
        """Tokens of one slot, None for a state."""
        return None if self.page_tokens is None else self.pages * self.page_tokens


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One role of one layer in a view: ``size_bytes`` from ``offset_bytes`` on in slot 0, counted from the pool's base.

    ``layer`` is the layer's number in the model and ``local_layer`` on the rank. ``parts`` are the planes of a packed
    buffer. ``per_rank`` says that every rank keeps the role once, beside whichever layer comes first.
    """

    layer: int
    local_layer: int
    role: str
    offset_bytes: int
    size_bytes: int
    parts: tuple[Part, ...] = ()
    per_rank: bool = False

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose data lie in it, in order."""
        return tuple(dict.fromkeys([part.layer for part in self.parts])) if self.parts else (self.layer,)


class View(msgspec.Struct, frozen=True):
    """The entries of one pool that are shared out alike, by offset.

    ``layer_bytes`` is what each layer has in it, ``runs`` are the contiguous bytes of slot 0, as (offset, bytes).
    """

    life_cycle: int
    pool: int
    slot_stride_bytes: int
    role_layout: RoleLayout
    entries: tuple[Entry, ...]
    layer_bytes: int
    runs: tuple[tuple[int, int], ...]


class Region(msgspec.Struct, frozen=True):
    """Memory that is registered with the wire: bytes of one pool, from the first that a view reaches to the last."""

    pool: int
    first_byte: int
    size_bytes: int


class Registration(msgspec.Struct, frozen=True):
    """Everything that one rank registers. Pools and life cycles are numbered as in the rank's ``Layout``."""

    rank: int
    stage: int
    views: tuple[View, ...]
    regions: tuple[Region, ...]
    life_cycles: tuple[LifeCycle, ...]
