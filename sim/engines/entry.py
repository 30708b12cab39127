"""``Entry``: one row of the ledger of what released engines get wrong (``limits``)."""

from __future__ import annotations

from ..limits import KnownLimit


class Entry(KnownLimit, frozen=True, kw_only=True):
    """One defect; ``releases`` are those that the example was run against."""

    releases: tuple[str, ...] = ("0.33.0",)
