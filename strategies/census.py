"""``census``: how often a strategy reaches each rare class, and how much of it an allocator supports.

>>> from kvsan.strategies.specs import cache_specs
>>> counted = census(cache_specs(family="dense", rare="KV heads = TP"), examples=20)
>>> counted.examples, counted.classes["KV heads = TP"] > 5
(20, True)
"""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ..model.spec import CacheSpec
from ..sim.registry import allocate
from ..sim.rejection import Rejected
from .rare import CLASSES, classes_of


class Census(msgspec.Struct):
    """Counts over ``examples`` specs: those in each class, and those that the allocator does not support."""

    examples: int = 0
    unsupported: int = 0
    classes: dict[str, int] = {}

    @property
    def support(self) -> float:
        """The share of specs that the allocator supports; 1 where none was asked."""
        return 1 - self.unsupported / self.examples if self.examples else 1.0


def census(
    specs: st.SearchStrategy[CacheSpec],
    *,
    examples: int = 2000,
    seed: int = 0,
    allocator: str | None = None,
) -> Census:
    """Return the classes of ``examples`` specs drawn with ``seed``; ``allocator`` is asked what it supports.

    Without an allocator, ties and merged life cycles are those of V2's rule of equal sizes.
    """
    counted = Census(classes=dict.fromkeys(CLASSES, 0))
    _run(specs, counted, examples, seed, allocator)
    return counted


def _run(
    specs: st.SearchStrategy[CacheSpec], counted: Census, examples: int, number: int, allocator: str | None
) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(specs)
    def count(spec: CacheSpec) -> None:
        counted.examples += 1
        for name in classes_of(spec):
            counted.classes[name] += 1
        if allocator is not None:
            try:
                allocate(spec, allocator)
            except Rejected as rejection:
                counted.unsupported += not rejection.supported

    count()
