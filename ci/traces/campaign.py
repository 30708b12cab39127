"""Campaigns over traces: draw them, run them, keep the smallest failure of every rule, reduce it, save it.

As in campaigns over specs, chunks have seeds of their own and nothing that one does depends on another, so results are
the same for any number of workers. A chunk is 50 traces, some 10,000 operations.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from ...model.errors import SpecError
from ...sim.cache.managers import running_cache
from ...sim.cache.names import layout_allocator
from ...sim.cache.run import run_trace
from ...sim.cache.trace import Trace
from ...sim.finding import Finding
from ...sim.registry import resolve
from ...sim.rejection import Rejected
from ..campaign import Options, Progress
from ..cases import Case, FoundRule, add_case, require_folder
from ..chunked import chunk_tasks, chunks_in_order, save_reduced, saved_cases_of
from ..determinism import chunk_seed, without_folder, without_local_constants
from .coverage import SITUATIONS, TraceCounts, TraceCoverage, coverage_of_traces, new_counts
from .judging import judge_trace
from .reducer import reduce_trace
from .simplicity import size, trace_key

CHUNK_TRACES: Final = 50
"""Traces of one chunk."""
STARTS: Final = 4
"""Failing traces of one rule kept of each chunk; a reduction begins with up to twice as many, because a single one may
lead to a trace that is small, and not the smallest."""


class TraceHit(msgspec.Struct, frozen=True):
    """A trace that breaks ``rule``: its number from 1, the operations run up to there, and its file."""

    rule: str
    example: int
    operations: int
    message: str
    trace: Trace
    saved: str | None


class TraceChunk(msgspec.Struct, frozen=True):
    """What one chunk found and covered; ``refused`` counts specs that the allocator refused."""

    examples: int
    operations: int
    refused: int
    known: int
    hits: dict[str, list[TraceHit]]
    counts: TraceCounts


class TraceFault(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that the cache breaks, with its reduced trace.

    ``examples_to_find`` and ``operations_to_find`` count from the campaign's start; ``size`` is operations.
    """

    rule: str
    message: str
    case: str | None
    examples_to_find: int
    operations_to_find: int
    size: int
    trace: Trace


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole campaign."""

    allocator: str
    seed: int
    examples: int
    operations: int
    seconds: float
    refused: int
    known: int
    faults: list[TraceFault]
    coverage: TraceCoverage
    interrupted: bool = False

    @property
    def nothing_checked(self) -> bool:
        """Whether every single spec was refused."""
        return self.examples > 0 and self.refused == self.examples


def run_trace_campaign(options: Options, progress: Callable[[Progress], None] = lambda state: None) -> TraceResult:
    """Run a campaign to the end of its budget, or until Ctrl-C, and return what it found.

    Raises ``SpecError`` for an unknown allocator, one that no trace runs on, and a folder that cannot be written.
    """
    resolve(layout_allocator(options.allocator))
    if options.cases is not None:
        require_folder(options.cases, "cases")
    started = time.monotonic()
    cases = saved_cases_of(options, Trace, lambda trace, allocator: run_trace(trace, allocator).rules)
    counts = new_counts()
    hits: dict[str, list[TraceHit]] = {}
    examples = operations = refused = known = 0
    interrupted = False
    try:
        tasks = chunk_tasks(options, started, CHUNK_TRACES)
        for chunk in chunks_in_order(partial(run_trace_chunk, options), tasks, options.workers):
            for rule, found in chunk.hits.items():
                hits.setdefault(rule, []).extend(
                    msgspec.structs.replace(hit, example=examples + hit.example, operations=operations + hit.operations)
                    for hit in found
                )
            examples, operations = examples + chunk.examples, operations + chunk.operations
            refused, known = refused + chunk.refused, known + chunk.known
            counts.add(chunk.counts)
            rate = examples / max(time.monotonic() - started, 1e-9)  # path: a rate, no size
            progress(Progress(examples, rate, tuple(hits), len(counts.classes), len(SITUATIONS)))
            if options.stop_rule is not None and len(hits.get(options.stop_rule, ())) >= STARTS:
                break
    except KeyboardInterrupt:
        interrupted = True
    faults = []
    for found in sorted(hits.values(), key=lambda entry: (entry[0].example, entry[0].rule)):
        fault, ended = _settle(found, options, reduce=options.reduce and not interrupted)
        interrupted = interrupted or ended
        faults.append(fault)
    return TraceResult(
        allocator=options.allocator,
        seed=options.seed,
        examples=examples,
        operations=operations,
        seconds=time.monotonic() - started,
        refused=refused,
        known=known,
        faults=faults,
        coverage=coverage_of_traces(counts, options.allocator, cases),
        interrupted=interrupted,
    )


class _Stop(Exception):
    """Ends a chunk from inside its test function."""


def run_trace_chunk(options: Options, chunk: int, count: int) -> TraceChunk:
    """Draw and run ``count`` traces; the first case of each rule is saved at once."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from ...strategies.traces import traces

    run = _Chunk(options)

    @seed(chunk_seed(options.seed, chunk))
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(traces(options.allocator))
    def run_one(trace: Trace) -> None:
        if run.ended:
            raise _Stop  # Hypothesis runs the last example once more before it ends
        run.judge(trace)
        if run.ended:
            raise _Stop

    with without_local_constants(), without_folder(), contextlib.suppress(_Stop), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an example whose text is long
        run_one()
    if run.error is not None:
        raise run.error
    return run.result()


class _Chunk:
    """One chunk while it runs."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._examples = self._operations = self._refused = self._known = 0
        self._hits: dict[str, list[TraceHit]] = {}
        self._counts = new_counts()
        self.error: SpecError | None = None
        self.ended = False

    def judge(self, trace: Trace) -> None:
        """Run one trace and keep what it breaks; errors end the chunk."""
        allocator = self._options.allocator
        self._examples += 1
        try:
            cache = running_cache(trace.spec, allocator)
            judged = judge_trace(trace, allocator, cache)
        except Rejected as refusal:
            self._refused += 1
            if refusal.supported or refusal.rule != "rejected":
                self._keep(Finding(rule=refusal.rule, message=refusal.message, remedy=refusal.remedy), trace, 0)
            return
        except SpecError as error:
            self.error, self.ended = error, True
            return
        self._operations += judged.verdict.done
        self._counts.count(trace, judged.verdict, frozenset(cache.seen))
        self._known += len(judged.faults) - len(judged.outside)
        try:
            for fault in judged.outside:
                self._keep(fault, trace, judged.verdict.done)
        except SpecError as error:  # a full disk
            self.error, self.ended = error, True
        if len(self._hits.get(self._options.stop_rule or "", ())) >= STARTS:
            self.ended = True

    def _keep(self, fault: Finding, trace: Trace, done: int) -> None:
        held = self._hits.setdefault(fault.rule, [])
        if len(held) >= STARTS:
            return
        cut = msgspec.structs.replace(trace, operations=trace.operations[:done])
        folder, saved = self._options.cases, None
        if folder is not None and not held:
            case = _case(self._options.allocator, cut, fault)
            if not (folder / case.file_name).exists():
                saved = add_case(case, folder).name
        held.append(TraceHit(fault.rule, self._examples, self._operations, fault.message, cut, saved))

    def result(self) -> TraceChunk:
        """Return what the chunk has found."""
        return TraceChunk(self._examples, self._operations, self._refused, self._known, self._hits, self._counts)


def _case(allocator: str, trace: Trace, fault: Finding | TraceHit) -> Case:
    found = (FoundRule(rule=fault.rule, message=fault.message),)
    return Case(allocator=allocator, input=trace, found=found)


def _settle(hits: list[TraceHit], options: Options, *, reduce: bool) -> tuple[TraceFault, bool]:
    """Return the fault of one rule, reduced and saved, and whether Ctrl-C ended the reduction.

    The reduction begins with the smallest few of the traces that were found.
    """
    hit = hits[0]
    starts = sorted(hits[: 2 * STARTS], key=lambda entry: trace_key(entry.trace))
    best = [starts[0]]

    def fails(candidate: Trace) -> bool:
        outside = judge_trace(candidate, options.allocator).outside
        message = next((fault.message for fault in outside if fault.rule == hit.rule), None)
        if message is None:
            return False
        if trace_key(candidate) <= trace_key(best[0].trace):
            best[0] = msgspec.structs.replace(hit, trace=candidate, message=message)
        return True

    interrupted = False
    if reduce:
        try:
            with contextlib.suppress(ValueError):  # a cache that changes its mind: the trace stays as it was found
                reduce_trace(starts[0].trace, fails, *(entry.trace for entry in starts[1:]))
        except KeyboardInterrupt:
            interrupted = True
    trace, place = best[0].trace, None
    if options.cases is not None:
        case = _case(options.allocator, trace, best[0])
        place = save_reduced(case, hit.rule, [entry.saved for entry in hits], options.cases)
    fault = TraceFault(
        rule=hit.rule,
        message=best[0].message,
        case=place,
        examples_to_find=hit.example,
        operations_to_find=hit.operations,
        size=size(trace),
        trace=trace,
    )
    return fault, interrupted
