"""What the tests of the running cache share: operations written as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsan.model.spec import CacheSpec
from kvsan.sim.cache.cache import RunningCache
from kvsan.sim.cache.managers import running_cache
from kvsan.sim.cache.refusal import Refused
from kvsan.sim.cache.trace import Operation


class Driven:
    """A running cache, and the refusals of the operations so far."""

    def __init__(self, cache: RunningCache) -> None:
        self.cache = cache
        self.refusals: list[Refused | None] = []

    def do(self, text: str) -> Driven:
        """Do operations such as ``admit 0 3;step 1``."""
        for kind, *arguments in map(str.split, text.split(";")):
            operation = Operation(kind, *map(int, arguments))
            self.refusals.append(self.cache.apply(len(self.refusals), operation))
        return self

    @property
    def rules(self) -> list[str]:
        """The rules that are broken."""
        return [finding.rule for finding in self.cache.shadow.findings]

    @property
    def reasons(self) -> list[str]:
        """The reasons of the refusals."""
        return [refusal.reason for refusal in self.refusals if refusal is not None]

    def slots(self, request: int, cycle: int = 0, beam: int = 0) -> list[int]:
        """Return where the blocks of one beam are."""
        row = self.cache.sequences[request].blocks[cycle][beam]
        return [-1 if page is None else page.slot for page in row]

    def used(self, group: int = 0) -> int:
        """Return the slots of a group that somebody holds."""
        return self.cache.ledger.owned[group]


@pytest.fixture
def drive() -> Callable[..., Driven]:
    """Return a function that starts a cache: ``drive(layers, tokens, slots, allocator)``."""

    def started(layers, tokens: int = 4, slots: int = 8, allocator: str = "trtllm-v2", *, record: bool = False):
        spec = CacheSpec(layers=tuple(layers), tokens_per_block=tokens, slots=slots)
        return Driven(running_cache(spec, allocator, record=record))

    return started
