"""``Reduction``: from the specs that break one rule to the simplest that does, saved in place of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..model.spec import CacheSpec, decode_spec, encode_spec
from ..sim.limits import faults_outside_limits, limits_of
from ..sim.registry import resolve
from .cases import Case, FoundRule, add_case, withdraw_case
from .reducer import reduce_spec
from .simplicity import size


class Hit(msgspec.Struct, frozen=True):
    """The first example of a chunk that breaks ``rule`` (counted from 1) and the smallest spec of the chunk that does.

    ``seconds`` is when the first one was seen, from the start of the chunk; ``saved`` its file, None where
    nothing new was written.
    """

    rule: str
    example: int
    message: str
    spec: bytes
    size: int
    seconds: float
    saved: str | None


class RuleHits(msgspec.Struct):
    """A rule over all chunks: the example that first broke it, its smallest spec, and the files saved on the way."""

    rule: str
    example: int
    smallest: Hit
    saved: list[str]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that the allocator breaks, with its reduced case.

    ``examples_to_find`` counts examples from the campaign's start; ``size`` is layers plus buffers of the reduced spec.
    """

    rule: str
    message: str
    case: str | None
    examples_to_find: int
    size: int
    spec: CacheSpec


class Reduction:
    """The simplest spec so far that breaks one rule of ``hits``, and its message: what the chunks found, or better."""

    def __init__(self, hits: RuleHits, allocator: str) -> None:
        self.hits, self.allocator = hits, allocator
        self.spec, self.message = decode_spec(hits.smallest.spec), hits.smallest.message

    def run(
        self, record: Callable[[bytes], None] = lambda spec: None, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Reduce as far as it goes; return whether that was to the end, False where Ctrl-C was before it.

        What an allocator that changes its mind no longer breaks stays as it was found. ``record`` is told each spec
        before it is judged, and ``stopped`` is asked whether to end before the next.
        """
        allocator, limits, rule = resolve(self.allocator), limits_of(self.allocator), self.hits.rule

        def fails(candidate: CacheSpec) -> bool:
            """Say whether a candidate breaks the rule; the reducer asks for simpler ones only, so keep it if so."""
            if stopped():
                raise KeyboardInterrupt
            record(encode_spec(candidate))
            try:
                faults, _, _ = faults_outside_limits(candidate, allocator, limits)
            except Exception:  # no layout: not this rule
                return False
            message = next((fault.message for fault in faults if fault.rule == rule), None)
            if message is None:
                return False
            self.spec, self.message = candidate, message
            return True

        try:
            with contextlib.suppress(ValueError):
                reduce_spec(self.spec, fails)
        except KeyboardInterrupt:
            return False
        return True

    def save(self, folder: Path | None) -> Fault:
        """Save the case in place of the ones saved on the way, and return the fault."""
        rule, saved = self.hits.rule, None
        if folder is not None:
            path = add_case(case_of(self.allocator, self.spec, rule, self.message), folder)
            saved = str(path)
            for name in self.hits.saved:
                if name != path.name:
                    withdraw_case(folder / name, rule)
        return Fault(
            rule=rule,
            message=self.message,
            case=saved,
            examples_to_find=self.hits.example,
            size=size(self.spec),
            spec=self.spec,
        )


def case_of(allocator: str, spec: CacheSpec, rule: str, message: str) -> Case:
    """Return the case of one rule that ``allocator`` breaks on ``spec``."""
    return Case(allocator=allocator, input=spec, found=(FoundRule(rule=rule, message=message),))
