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
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from ..model.errors import SpecError
from ..sim.finding import Finding
from ..sim.registry import Allocator
from ..sim.transfer.method import Method
from ..sim.transfer.pair import Pair, judge_pair
from ..sim.transfer.planning import SOUND
from .campaign import Options, Progress, broken_allocator
from .cases import Case, FoundRule, add_case, encode_input, require_folder
from .chunked import chunk_tasks, save_reduced, saved_cases_of
from .determinism import chunk_seed, chunk_sizes, without_folder, without_local_constants
from .ledger import SavedCases
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
    raised: list[BaseException] = []

    def once(pair: Pair) -> None:
        if raised:
            raise _Stop  # Hypothesis runs the last example once more before it ends
        try:
            look(pair)
        except BaseException as error:
            raised.append(error)
            raise

    with without_local_constants(), without_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an example whose text is long
        try:
            seeded(seed)(quiet(given(peer_pairs(**drawn))(once)))()
        except BaseException:
            if raised:
                raise raised[0] from None  # and not what came of the second run
            raise


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
    cases = SavedCases((), (), ())
    counts, hits = new_counts(), dict[str, list[PairHit]]()
    examples = known = 0
    interrupted = False
    try:
        for chunk in _chunks(options, refusals, started):
            if isinstance(chunk, SavedCases):
                cases = chunk
                continue
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
    with _settler(options) as settle_hits:
        for found in sorted(hits.values(), key=lambda entry: (entry[0].examples_to_find, entry[0].rule)):
            fault, ended = settle_hits(found, options, refusals, options.reduce and not interrupted)
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


def _chunks(options: Options, refusals: str, started: float) -> Iterator[PairChunk | SavedCases]:
    """Yield what became of the saved cases, then the chunks in order, run here or by worker processes.

    On Ctrl-C the chunks begun are yielded as far as they got, and ``KeyboardInterrupt`` is raised after them.
    """
    tasks = chunk_tasks(options, started, CHUNK_PAIRS)
    if options.workers > 1 or options.isolate:
        from .transfer_workers import chunks_of_workers

        yield from chunks_of_workers(options, refusals, tasks)
        return
    yield judge_saved_pairs(options)
    for chunk, count in tasks:
        run = PairRun(options, refusals, chunk)
        try:
            run.run(count)
        except KeyboardInterrupt:
            yield run.result()
            raise
        yield run.result()


Settle = Callable[[list[PairHit], Options, str, bool], tuple[PairFault, bool]]


def _settler(options: Options) -> contextlib.AbstractContextManager[Settle]:
    """Return what reduces and saves the hits of a rule, here or in a process of its own."""
    if not options.isolate:
        return contextlib.nullcontext(settle)
    from .transfer_workers import settling_worker

    return settling_worker(options)


def judge_saved_pairs(options: Options, record: Callable[[bytes], None] = lambda pair: None) -> SavedCases:
    """Judge the saved pairs of the campaign's folder again, those of its allocator; ``record`` is told each."""
    return saved_cases_of(options, Pair, lambda pair, allocator: judge_transfer(pair, allocator).rules, record)


class PairRun:
    """One chunk while it runs.

    ``record`` is told each pair before it is judged, and ``stopped`` is asked whether to end before the next.
    """

    def __init__(
        self,
        options: Options,
        refusals: str,
        chunk: int,
        record: Callable[[bytes], None] = lambda pair: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._options, self._refusals, self._chunk = options, refusals, chunk
        self._record, self._stopped = record, stopped
        self._counts, self._hits = new_counts(), dict[str, list[PairHit]]()
        self._examples = self._known = 0

    def run(self, count: int) -> None:
        """Draw and judge ``count`` pairs; the first case of each rule is saved at once.

        Raises ``SpecError`` for an allocator whose answer cannot be judged, with the pair saved.
        """
        family = self._options.family or family_of_pairs(self._options.allocator)
        with contextlib.suppress(_Stop):
            draw_pairs(chunk_seed(self._options.seed, self._chunk), count, self._look, family=family)

    def result(self) -> PairChunk:
        """Return what was found so far."""
        return PairChunk(self._examples, self._known, self._hits, self._counts)

    def _look(self, pair: Pair) -> None:
        if self._stopped():
            raise _Stop
        self._record(encode_input(pair))
        try:
            judged = judge_transfer(pair, self._options.allocator)
        except Exception as error:
            raise no_verdict(self._options, pair, self._chunk, error) from None
        self._examples += 1
        self._counts.count(pair, judged)
        outside = judged.outside(self._refusals)
        self._known += len(judged.excused)
        for fault in outside:
            held = self._hits.setdefault(fault.rule, [])
            if len(held) < STARTS and not any(hit.pair == pair for hit in held):
                saved = _saved(self._options, pair, fault, held)
                held.append(PairHit(fault.rule, fault.message, pair, self._examples, saved))
        if self._options.stop_rule in self._hits:
            raise _Stop


def no_verdict(options: Options, pair: Pair, chunk: int, error: Exception) -> SpecError:
    """Return the error of a pair that cannot be judged, the pair saved."""
    if isinstance(error, SpecError):
        problem = error.problem if error.field == "allocator" else str(error)
    else:
        problem = f"gave layouts between which nothing can be moved ({type(error).__name__}: {error})"
    return broken_allocator(options, pair, chunk, problem)


def _saved(options: Options, pair: Pair, fault: Finding, held: list[PairHit]) -> str | None:
    """Save the first pair of a rule, and return its file's name where it is new."""
    if options.cases is None or held:
        return None
    case = pair_case(options.allocator, pair, fault)
    return None if (options.cases / case.file_name).exists() else add_case(case, options.cases).name


def pair_case(allocator: str, pair: Pair, fault: Finding | PairHit) -> Case:
    """Return the case of one rule that is broken on ``pair``."""
    return Case(allocator=allocator, input=pair, found=(FoundRule(rule=fault.rule, message=fault.message),))


def settle(
    hits: list[PairHit],
    options: Options,
    refusals: str,
    reduce: bool,
    record: Callable[[bytes], None] = lambda pair: None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[PairFault, bool]:
    """Return the fault of one rule, reduced and saved, and whether Ctrl-C (or ``stopped``) ended the reduction.

    ``record`` is told each pair before it is judged.
    """
    rule = hits[0].rule
    starts = sorted(hits[: 2 * STARTS], key=lambda entry: pair_key(entry.pair))[:STARTS]
    best = [starts[0]]

    def fails(candidate: Pair) -> bool:
        if stopped():
            raise KeyboardInterrupt
        record(encode_input(candidate))
        try:
            outside = judge_transfer(candidate, options.allocator).outside(refusals)
        except Exception:  # too large to be proved, or an answer that is no layout: another failure than this one
            return False
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
