"""The structural reducer: the simplest spec that still fails, by greedy moves on the decoded spec to a fixpoint.

    >>> from kvsan.ci.simplicity import size
    >>> from kvsan.model.layers import AttentionLayer
    >>> spec = CacheSpec(layers=(AttentionLayer(kv_heads=8, head_dim=64),) * 40, kv_format="fp8")
    >>> def fails(candidate):
    ...     return any(getattr(layer, "kv_heads", 0) > 2 for layer in candidate.layers)
    >>> found = reduce_spec(spec, fails).spec
    >>> len(found.layers), found.layers[0].kv_heads, found.layers[0].head_dim, found.kv_format.value, found.slots
    (1, 3, 128, 'bf16', 1)

A candidate counts only if it is simpler by ``simplicity_key`` and still fails, so the result is never larger than the
input, and running again changes nothing. Three phases, the last two repeated until neither finds anything:

1. layers are dropped in chunks, halves first, so that a spec of 10,000 layers is small after a few dozen checks;
2. single moves (``structure``, ``fields``), simplest values first;
3. pairs of moves: one that makes the spec simpler but lets it pass, followed by any other that makes it fail again.
   That is how a format changes together with a head dim, heads together with tensor parallelism, one page together
   with another.

Nothing is random, and no clock is read. Work is counted in layers, because a check costs as much as it has layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import msgspec

from ...model.errors import SpecError
from ...model.spec import CacheSpec
from ..simplicity import simplicity_key
from .fields import Move, layer_moves, spec_moves
from .structure import drop_moves, structure_moves

CHUNKS_PER_PASS = 128
"""Chunks that one pass over the layers tries at most: larger specs are not tried layer by layer."""
MAX_WORK = 150_000
"""Layers in all candidates checked, plus an eighth of those in all candidates built; bounds the time on specs of
thousands of layers that all matter."""
MAX_PAIRED_LAYERS = 64
"""Layers up to which pairs of moves are tried."""


class Reduction(msgspec.Struct, frozen=True):
    """The simplest failing spec found, and how many candidates were checked for it."""

    spec: CacheSpec
    checks: int


class _OutOfChecks(Exception):
    """The allowed number of checks, or the work, is used up."""


class _Search:
    """The simplest failing spec so far."""

    def __init__(self, spec: CacheSpec, fails: Callable[[CacheSpec], bool], max_checks: int) -> None:
        self.spec = spec
        self.key = simplicity_key(spec)
        self.checks = 0
        self._eighths = 0
        self._fails = fails
        self._max_checks = max_checks
        self._passed: set[CacheSpec] = set()

    def offer(self, candidate: CacheSpec) -> bool:
        """Take ``candidate`` if it is simpler and fails; say whether it was taken."""
        count = len(candidate.layers) + len(candidate.draft.layers)
        self._eighths += count
        key = simplicity_key(candidate)
        if key >= self.key or candidate in self._passed:
            return False
        self._eighths += 8 * count
        if self.checks >= self._max_checks or self._eighths > 8 * MAX_WORK:
            raise _OutOfChecks
        self.checks += 1
        if not self._fails(candidate):
            self._passed.add(candidate)
            return False
        self.spec, self.key = candidate, key
        return True


def reduce_spec(spec: CacheSpec, fails: Callable[[CacheSpec], bool], *, max_checks: int = 20_000) -> Reduction:
    """Return the simplest spec reached from ``spec`` for which ``fails`` is true, after at most ``max_checks`` calls.

    Raises ``ValueError`` when ``spec`` itself does not fail.
    """
    if not fails(spec):
        raise ValueError("the spec to reduce does not fail")
    search = _Search(spec, fails, max_checks)
    try:
        _drop_layers(search)
        while True:
            while _single_moves(search):
                _drop_layers(search)
            if len(search.spec.layers) > MAX_PAIRED_LAYERS or not _paired_moves(search):
                break
    except _OutOfChecks:
        pass
    return Reduction(search.spec, search.checks + 1)


def _drop_layers(search: _Search) -> None:
    """Drop layers in chunks: halves, then quarters, down to single ones or to ``CHUNKS_PER_PASS`` chunks."""
    chunk = _layer_count(search.spec)
    while chunk:
        end = _layer_count(search.spec)
        while end > 0:
            first = max(0, end - chunk)
            for move in drop_moves(search.spec, first, end):
                if _try(search, move):
                    break
            end = first
        count = _layer_count(search.spec)
        chunk = min(chunk >> 1, count)
        if chunk * CHUNKS_PER_PASS < count:
            break


def _layer_count(spec: CacheSpec) -> int:
    return len(spec.layers) + len(spec.draft.layers)


def _try(search: _Search, move: Move) -> bool:
    candidate = _built(move)
    return candidate is not None and search.offer(candidate)


def _built(move: Move) -> CacheSpec | None:
    """Return the spec that a move builds, None where it is no spec."""
    try:
        return move()
    except SpecError:
        return None


def _moves(spec: CacheSpec) -> Iterator[Move]:
    return chain(structure_moves(spec), spec_moves(spec), layer_moves(spec))


def _single_moves(search: _Search) -> bool:
    """Apply single moves until none helps; say whether any did."""
    moved = False
    again = True
    while again:
        again = any(_try(search, move) for move in _moves(search.spec))
        moved = moved or again
    return moved


def _paired_moves(search: _Search) -> bool:
    """Apply the first pair of moves that helps; say whether there was one."""
    start = search.spec
    tried = set()
    for move in chain(_drops(start), _moves(start)):
        first = _built(move)
        if first is None or first in tried or simplicity_key(first) >= search.key:
            continue
        tried.add(first)
        if any(_try(search, second) for second in _moves(first)):
            return True
    return False


def _drops(spec: CacheSpec) -> Iterator[Move]:
    return chain.from_iterable(drop_moves(spec, index, index + 1) for index in range(_layer_count(spec)))
