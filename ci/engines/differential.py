"""An installed engine against its model: the same specs to both, byte map for byte map, refusals by class.

    python -m kvsan.ci.engines.differential --allocator vllm --max-examples 20000 [--seed N] [--cases DIR]

prints one JSON document. Specs are those of a campaign with the same seed. What is known (docs/findings.md) is counted
apart; anything else that differs is saved as a case, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from ...model.errors import SpecError
from ...model.spec import CacheSpec
from ...sim.finding import Finding
from ...sim.limits import KnownLimit, limits_of
from ...sim.registry import resolve
from ..cases import Case, FoundRule, add_case
from ..determinism import chunk_seed, chunk_sizes, without_folder, without_local_constants
from .comparison import DIFFERENT, Comparison, EngineAllocator, begun_ahead

MAX_SHOWN = 3
"""Differences of one kind and beginning that are told in words and saved; the rest is counted."""
BEGINNING = 40
"""Characters of a difference's first sentence that tell it from others."""


class Difference(msgspec.Struct, frozen=True):
    """One spec on which engine and model differ."""

    kind: str
    sentences: tuple[str, ...]
    case: str | None


class Differential(msgspec.Struct):
    """How many specs came to what; ``known`` are differences of the ledger, by its names."""

    allocator: str
    engine: str
    seed: int
    examples: int = 0
    seconds: float = 0.0  # float: a time
    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    known: Counter[str] = msgspec.field(default_factory=Counter)
    differences: list[Difference] = msgspec.field(default_factory=list)


def run_differential(
    allocator: EngineAllocator, examples: int, seed: int = 0, cases: Path | None = None
) -> Differential:
    """Compare engine and model on ``examples`` specs, as a campaign draws them."""
    found = Differential(allocator.name, allocator.engine(), seed)
    limits = limits_of(allocator.name, allocator.release)
    started = time.monotonic()
    for chunk, count in enumerate(chunk_sizes(examples)):
        for spec in begun_ahead(allocator, drawn_specs(allocator.drawn_as, seed, chunk, count)):
            try:
                compared = allocator.compare(spec)
            except SpecError as error:  # views of other shapes than asked for
                compared = Comparison("differ", (str(error),))
            _note(found, spec, compared, limits, cases)
    found.seconds = round(time.monotonic() - started, 3)
    return found


def drawn_specs(model: str, seed: int, chunk: int, examples: int) -> list[CacheSpec]:
    """Return the specs that chunk ``chunk`` of a campaign with ``seed`` draws for ``model``."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from ...strategies.specs import specs_for

    specs: list[CacheSpec] = []

    @seeded(chunk_seed(seed, chunk))
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs_for(model))
    def keep(spec: CacheSpec) -> None:
        specs.append(spec)

    with without_local_constants(), without_folder():
        keep()
    return specs


def _note(
    found: Differential, spec: CacheSpec, compared: Comparison, limits: tuple[KnownLimit, ...], cases: Path | None
) -> None:
    found.examples += 1
    known = known_limit(spec, compared, limits)
    if known is not None:
        found.known[known.name] += 1
        return
    found.kinds[compared.kind] += 1
    if compared.kind not in DIFFERENT:
        return
    like = (compared.kind, compared.sentences[0][:BEGINNING])
    shown = [(entry.kind, entry.sentences[0][:BEGINNING]) for entry in found.differences]
    if shown.count(like) >= MAX_SHOWN:
        return
    saved = None
    if cases is not None:
        rule = FoundRule(rule=compared.rule or "op-address", message=compared.sentences[0])
        saved = add_case(Case(allocator=found.allocator, input=spec, found=(rule,)), cases).name
    found.differences.append(Difference(compared.kind, compared.sentences[:3], saved))


def known_limit(spec: CacheSpec, compared: Comparison, limits: tuple[KnownLimit, ...]) -> KnownLimit | None:
    """Return the entry of the ledger that explains what the engine did, None where there is none."""
    if compared.kind not in DIFFERENT:
        return None
    rule = compared.rule or "alias"  # what a layout that differs breaks, if anything
    fault = Finding(rule=rule, message=compared.sentences[0], remedy="")
    return next((limit for limit in limits if limit.excuses(fault) and limit.matches(spec)), None)


def main(arguments: list[str]) -> int:
    """Run one comparison from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="kvsan.ci.engines.differential")
    parser.add_argument("--allocator", default="vllm")
    parser.add_argument("--max-examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=Path, default=None)
    given = parser.parse_args(arguments)
    try:
        allocator = resolve(given.allocator)
        if not isinstance(allocator, EngineAllocator):
            parser.error(f"{given.allocator} is no installed engine")
        found = run_differential(allocator, given.max_examples, given.seed, given.cases)
    except SpecError as error:
        parser.error(str(error))
    print(msgspec.json.encode(found).decode())
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
