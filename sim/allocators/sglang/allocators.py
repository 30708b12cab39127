"""The shipped SGLang allocators by name."""

from __future__ import annotations

from ....model.spec import CacheSpec
from ...layout import Layout
from .pools import lay_out_pools
from .unified import lay_out_unified


def allocate_sglang(spec: CacheSpec) -> Layout:
    """Return the layout of ``sglang``: token pools, and states layer by layer; or raise ``Rejected``."""
    return lay_out_pools(spec, "sglang")


def allocate_envelope(spec: CacheSpec) -> Layout:
    """Return the layout of ``sglang-envelope``: all states of a request in one entry; or raise ``Rejected``."""
    return lay_out_pools(spec, "sglang-envelope", envelope=True)


def allocate_speculative(spec: CacheSpec) -> Layout:
    """Return the layout of ``sglang-speculative``: beside a request's states those of its draft tokens, whose
    convolution windows overlap; or raise ``Rejected``."""
    return lay_out_pools(spec, "sglang-speculative", speculative=True)


def allocate_unified(spec: CacheSpec) -> Layout:
    """Return the layout of ``sglang-unified``: one buffer, tokens from its low end up, states from its high end down;
    or raise ``Rejected``."""
    return lay_out_unified(spec, "sglang-unified")
