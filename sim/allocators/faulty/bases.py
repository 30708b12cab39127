"""The sound layout that a fault varies, where it is sound.

An allocator that counts as sound may have known limits: specs on which it breaks some rules by a published weakness of
its own. A faulty allocator refuses those as outside of what it supports, so that all its findings are its own.
"""

from __future__ import annotations

from ....model.spec import CacheSpec
from ...layout import Layout
from ...limits import limits_of
from ...registry import Allocator
from ...rejection import Rejected
from . import base_of


def sound_layout(spec: CacheSpec, name: str, allocate: Allocator) -> Layout:
    """Return the layout that ``allocate`` (the base of fault ``name``, or a policy made of it) gives ``spec``.

    Raises ``Rejected`` where the base refuses, and inside the base's known limits.
    """
    try:
        layout = allocate(spec)
    except Rejected as refusal:
        if refusal.supported:
            _refuse_limits(spec, name)
        raise
    _refuse_limits(spec, name)
    return layout


def _refuse_limits(spec: CacheSpec, name: str) -> None:
    """Raise ``Rejected`` (unsupported) where ``spec`` lies inside a known limit of the base of fault ``name``."""
    base = base_of(name)
    for limit in limits_of(base):
        if limit.matches(spec):
            raise Rejected(
                f"the spec lies inside a known limit of {base} ({limit.name}), and what breaks there is not {name}",
                f"use --allocator {base}",
                supported=False,
            )
