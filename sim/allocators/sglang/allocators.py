"""The shipped SGLang allocators by name."""

from __future__ import annotations

from ....model.spec import CacheSpec
from ...layout import Layout
from .pools import lay_out_pools


def allocate_sglang(spec: CacheSpec) -> Layout:
    """Return the layout of ``sglang``: token pools, and states layer by layer; or raise ``Rejected``."""
    return lay_out_pools(spec, "sglang", envelope=False)


def allocate_envelope(spec: CacheSpec) -> Layout:
    """Return the layout of ``sglang-envelope``: all states of a request in one entry; or raise ``Rejected``."""
    return lay_out_pools(spec, "sglang-envelope", envelope=True)
