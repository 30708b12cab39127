"""Campaigns over pairs: draw two deployments of one model, move a cache between them, keep, reduce and save what fails.

``run_pair_campaign`` is what ``kvsan fuzz --peers`` runs. ``run_pairs`` counts verdicts and reduces nothing, for any
method of moving. Chunks have seeds of their own, as in campaigns over specs, so equal seeds give equal pairs, for any
number of workers.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from ..sim.finding import Finding
from ..sim.registry import Allocator
from ..sim.transfer.method import Method
from ..sim.transfer.pair import Pair, judge_pair
from ..sim.transfer.planning import SOUND
from .campaign import Options, Progress
from .cases import Case, FoundRule, add_case, require_folder
from .chunked import chunk_tasks, chunks_in_order, save_reduced, saved_cases_of
from .determinism import chunk_seed, chunk_sizes, without_folder, without_local_constants
from .transfer_coverage import SITUATIONS, PairCounts, PairCoverage, coverage_of_pairs, new_counts
from .transfer_judging import family_of_pairs, judge_transfer, require_transfer
from .transfer_minima import pair_key, pair_size
from .transfer_reducer import reduce_pair

CHUNK_PAIRS: Final = 100
"""Pairs of one chunk of ``run_pair_campaign``: about a second."""
STARTS: Final = 4
"""Failing pairs of one rule kept of each chunk, and those that a reduction begins with."""


class PairHit(msgspec.Struct, frozen=True):
    """A pair on which a rule broke, its message, how many pairs had been tried, and its file."""

    rule: str
    message: str
    pair: Pair
    examples_to_find: int
    saved: str | None = None


class PairResult(msgspec.Struct, frozen=True):
    """All of ``run_pairs``: how many pairs came to which verdict, and what was found first of each rule."""

    examples: int
    seconds: float
    statuses: dict[str, int]
    hits: tuple[PairHit, ...]


class PairChunk(msgspec.Struct, frozen=True):
    """What one chunk found and covered."""

    examples: int
    known: int
    hits: dict[str, list[PairHit]]
    counts: PairCounts


class PairFault(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that was broken, with its reduced pair; ``size`` is layers plus buffers of both sides."""

    rule: str
    message: str
    case: str | None
    examples_to_find: int
    size: int
    pair: Pair


class PairCampaign(msgspec.Struct, frozen=True, kw_only=True):
    """A whole campaign. ``refused`` counts pairs that do not fit and those of which an allocator refused a side."""

    allocator: str
    seed: int
    examples: int
    seconds: float
    refused: int
    known: int
    faults: list[PairFault]
    coverage: PairCoverage
    interrupted: bool = False

    @property
    def nothing_checked(self) -> bool:
        """Whether every single pair was refused."""
        return self.examples > 0 and self.refused == self.examples


class _Stop(Exception):
    """Ends a chunk from inside its test function."""


def draw_pairs(seed: int, examples: int, look: Callable[[Pair], None], **drawn: Any) -> None:
    """Call ``look`` with ``examples`` pairs of one seed; ``drawn`` are options of ``strategies.peers.peer_pairs``.

    Whatever ``look`` raises ends the drawing.
    """
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from ..strategies.peers import peer_pairs

    quiet = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    ended = False

    def once(pair: Pair) -> None:
        nonlocal ended
        if ended:
            raise _Stop  # Hypothesis runs the last example once more before it ends
        try:
            look(pair)
        except BaseException:
            ended = True
            raise

    with without_local_constants(), without_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an example whose text is long
        seeded(seed)(quiet(given(peer_pairs(**drawn))(once)))()


def run_pairs(
    examples: int,
    *,
    seed: int = 0,
    method: Method = SOUND,
    allocator: str | Allocator | None = None,
    stop_at_first: bool = False,
    refusals: str = "",
    **drawn: Any,
) -> PairResult:
    """Judge ``examples`` drawn pairs; ``drawn`` are options of ``strategies.peers.peer_pairs``.

    Refusals of pairs count as findings where their message contains ``refusals``, if that is given: two deployments of
    one model that do not fit are no fault of the transfer, but may be one of an allocator.

    An exception of any kind ends the campaign: refusals are verdicts, and nothing else may be raised.
    """
    started = time.monotonic()
    statuses: Counter[str] = Counter()
    hits: dict[str, PairHit] = {}

    def look(pair: Pair) -> None:
        if stop_at_first and hits:
            return
        verdict = judge_pair(pair, allocator, method=method)
        statuses[verdict.status] += 1
        refused = bool(refusals) and verdict.status == "refused"
        if refused or verdict.status == "findings":
            for finding in verdict.findings:
                if refused and refusals not in finding.message:
                    continue
                found = PairHit(finding.rule, finding.message, pair, statuses.total())
                hits.setdefault(finding.rule, found)

    for chunk, size in enumerate(chunk_sizes(examples)):
        if stop_at_first and hits:
            break
        draw_pairs(chunk_seed(seed, chunk), size, look, **drawn)
    return PairResult(statuses.total(), time.monotonic() - started, dict(statuses), tuple(hits.values()))


def run_pair_campaign(
    options: Options, progress: Callable[[Progress], None] = lambda state: None, *, refusals: str = ""
) -> PairCampaign:
    """Run a campaign to the end of its budget, or until Ctrl-C, and return what it found.

    ``options.allocator`` names an allocator, a faulty transfer or ``transfer``. A refused pair counts as a fault where
    the reason contains ``refusals``, if that is given. Raises ``SpecError`` for an unknown name, a layout that cannot
    be proved, and a folder that cannot be written.
    """
    require_transfer(options.allocator)
    if options.cases is not None:
        require_folder(options.cases, "cases")
    started = time.monotonic()
    cases = saved_cases_of(options, Pair, lambda pair, allocator: judge_transfer(pair, allocator).rules)
    counts, hits = new_counts(), dict[str, list[PairHit]]()
    examples = known = 0
    interrupted = False
    tasks = chunk_tasks(options, started, CHUNK_PAIRS)
    try:
        for chunk in chunks_in_order(partial(run_pair_chunk, options, refusals), tasks, options.workers):
            for rule, found in chunk.hits.items():
                hits.setdefault(rule, []).extend(
                    msgspec.structs.replace(hit, examples_to_find=examples + hit.examples_to_find) for hit in found
                )
            examples, known = examples + chunk.examples, known + chunk.known
            counts.add(chunk.counts)
            rate = examples / max(time.monotonic() - started, 1e-9)  # path: a rate, no size
            progress(Progress(examples, rate, tuple(hits), len(counts.classes), len(SITUATIONS)))
            if options.stop_rule is not None and options.stop_rule in hits:
                break
    except KeyboardInterrupt:
        interrupted = True
    faults = []
    for found in sorted(hits.values(), key=lambda entry: (entry[0].examples_to_find, entry[0].rule)):
        fault, ended = _settle(found, options, refusals, reduce=options.reduce and not interrupted)
        interrupted = interrupted or ended
        faults.append(fault)
    return PairCampaign(
        allocator=options.allocator,
        seed=options.seed,
        examples=examples,
        seconds=time.monotonic() - started,
        refused=counts.verdicts["refused"] + counts.verdicts["rejected"],
        known=known,
        faults=faults,
        coverage=coverage_of_pairs(counts, cases),
        interrupted=interrupted,
    )


def run_pair_chunk(options: Options, refusals: str, chunk: int, count: int) -> PairChunk:
    """Draw and judge ``count`` pairs; the first case of each rule is saved at once."""
    counts, hits = new_counts(), dict[str, list[PairHit]]()
    examples = known = 0

    def look(pair: Pair) -> None:
        nonlocal examples, known
        judged = judge_transfer(pair, options.allocator)
        examples += 1
        counts.count(pair, judged)
        outside = judged.outside(refusals)
        known += len(judged.excused)
        for fault in outside:
            held = hits.setdefault(fault.rule, [])
            if len(held) < STARTS and not any(hit.pair == pair for hit in held):
                held.append(PairHit(fault.rule, fault.message, pair, examples, _saved(options, pair, fault, held)))
        if options.stop_rule in hits:
            raise _Stop

    family = options.family or family_of_pairs(options.allocator)
    with contextlib.suppress(_Stop):
        draw_pairs(chunk_seed(options.seed, chunk), count, look, family=family)
    return PairChunk(examples, known, hits, counts)


def _saved(options: Options, pair: Pair, fault: Finding, held: list[PairHit]) -> str | None:
    """Save the first pair of a rule, and return its file's name where it is new."""
    if options.cases is None or held:
        return None
    case = pair_case(options.allocator, pair, fault)
    return None if (options.cases / case.file_name).exists() else add_case(case, options.cases).name


def pair_case(allocator: str, pair: Pair, fault: Finding | PairHit) -> Case:
    """Return the case of one rule that is broken on ``pair``."""
    return Case(allocator=allocator, input=pair, found=(FoundRule(rule=fault.rule, message=fault.message),))


def _settle(hits: list[PairHit], options: Options, refusals: str, *, reduce: bool) -> tuple[PairFault, bool]:
    """Return the fault of one rule, reduced and saved, and whether Ctrl-C ended the reduction."""
    rule = hits[0].rule
    starts = sorted(hits[: 2 * STARTS], key=lambda entry: pair_key(entry.pair))[:STARTS]
    best = [starts[0]]

    def fails(candidate: Pair) -> bool:
        outside = judge_transfer(candidate, options.allocator).outside(refusals)
        message = next((fault.message for fault in outside if fault.rule == rule), None)
        if message is None:
            return False
        if pair_key(candidate) <= pair_key(best[0].pair):
            best[0] = msgspec.structs.replace(starts[0], pair=candidate, message=message)
        return True

    interrupted = False
    if reduce:
        try:
            with contextlib.suppress(ValueError):  # an allocator that changes its mind: the pair stays as it was found
                reduce_pair(starts[0].pair, fails, *[entry.pair for entry in starts[1:]])
        except KeyboardInterrupt:
            interrupted = True
    place = None
    if options.cases is not None:
        case = pair_case(options.allocator, best[0].pair, best[0])
        place = save_reduced(case, rule, [entry.saved for entry in hits], options.cases)
    fault = PairFault(
        rule=rule,
        message=best[0].message,
        case=place,
        examples_to_find=hits[0].examples_to_find,
        size=pair_size(best[0].pair),
        pair=best[0].pair,
    )
    return fault, interrupted


__all__ = ["PairCampaign", "PairFault", "PairHit", "PairResult", "reduce_pair", "run_pair_campaign", "run_pairs"]
