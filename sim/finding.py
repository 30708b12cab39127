"""``Finding``: one way in which a layout is wrong, and ``Where`` it is."""

from __future__ import annotations

import msgspec


class Where(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One place that a finding or a refusal speaks of; whatever does not apply is left out.

    ``first_byte`` and ``last_byte`` (inclusive) count from the pool's base; those of a ``tensor`` are addresses, or on
    the meta device, which has none, count from its storage's first byte.
    """

    manager: str | None = None
    layer: int | None = None
    role: str | None = None
    group: int | None = None
    pool: int | None = None
    slot: int | None = None
    consumer: str | None = None
    first_byte: int | None = None
    last_byte: int | None = None
    tensor: str | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A broken rule: its name, one paragraph with the wrong and the right value, the way out, and the places
    involved."""

    rule: str
    message: str
    remedy: str
    where: tuple[Where, ...] = ()
