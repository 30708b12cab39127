"""Campaigns over traces: draw them, run them, keep the smallest failure of every rule, reduce it, save it.

As in campaigns over specs, chunks have seeds of their own and nothing that one does depends on another, so results are
the same for any number of workers. A chunk is 50 traces, some 10,000 operations.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from ...model.errors import SpecError
from ...sim.cache.managers import running_cache
from ...sim.cache.names import layout_allocator
from ...sim.cache.trace import Trace
from ...sim.finding import Finding
from ...sim.registry import resolve
from ...sim.rejection import Rejected
from ..campaign import Options, Progress, broken_allocator
from ..cases import Case, FoundRule, add_case, case_files, encode_input, load_case, require_folder
from ..chunked import chunk_tasks, save_reduced
from ..determinism import chunk_seed, without_folder, without_local_constants
from ..ledger import SavedCases
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
    if not options.isolate:
        resolve(layout_allocator(options.allocator))
    if options.cases is not None:
        require_folder(options.cases, "cases")
    started = time.monotonic()
    cases = SavedCases()
    counts = new_counts()
    hits: dict[str, list[TraceHit]] = {}
    examples = operations = refused = known = 0
    interrupted = False
    try:
        for chunk in _chunks(options, started):
            if isinstance(chunk, SavedCases):
                cases = chunk
                continue
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
    with _settler(options) as settle_hits:
        for found in sorted(hits.values(), key=lambda entry: (entry[0].example, entry[0].rule)):
            fault, ended = settle_hits(found, options, options.reduce and not interrupted)
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


def _chunks(options: Options, started: float) -> Iterator[TraceChunk | SavedCases]:
    """Yield what became of the saved cases, then the chunks in order, run here or by worker processes.

    On Ctrl-C the chunks begun are yielded as far as they got, and ``KeyboardInterrupt`` is raised after them.
    """
    tasks = chunk_tasks(options, started, CHUNK_TRACES)
    if options.workers > 1 or options.isolate:
        from .workers import chunks_of_workers

        yield from chunks_of_workers(options, tasks)
        return
    yield judge_saved_traces(options)
    for chunk, count in tasks:
        run = TraceRun(options, chunk)
        try:
            run.run(count)
        except KeyboardInterrupt:
            yield run.result()
            raise
        yield run.result()


def _settler(
    options: Options,
) -> contextlib.AbstractContextManager[Callable[[list[TraceHit], Options, bool], tuple[TraceFault, bool]]]:
    """Return what reduces and saves the hits of a rule, here or in a process of its own."""
    if not options.isolate:
        return contextlib.nullcontext(settle)
    from .workers import settling_worker

    return settling_worker(options)


class _Stop(Exception):
    """Ends a chunk from inside its test function."""


class TraceRun:
    """One chunk while it runs.

    ``record`` is told each trace before it is run, and ``stopped`` is asked whether to end before the next.
    """

    def __init__(
        self,
        options: Options,
        chunk: int,
        record: Callable[[bytes], None] = lambda trace: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._options = options
        self._chunk = chunk
        self._record = record
        self._stopped = stopped
        self._examples = self._operations = self._refused = self._known = 0
        self._hits: dict[str, list[TraceHit]] = {}
        self._counts = new_counts()
        self._error: SpecError | None = None

    def run(self, count: int) -> None:
        """Draw and run ``count`` traces; raise ``SpecError`` for an allocator that no trace runs on."""
        from hypothesis import HealthCheck, Phase, given, seed, settings

        from ...strategies.traces import traces

        self._try_worlds()

        @seed(chunk_seed(self._options.seed, self._chunk))
        @settings(
            max_examples=count,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(traces(self._options.allocator))
        def run_one(trace: Trace) -> None:
            if self._ended():
                raise _Stop  # Hypothesis runs the last example once more before it ends
            self._judge(trace)
            if self._ended():
                raise _Stop

        with without_local_constants(), without_folder(), contextlib.suppress(_Stop), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an example whose text is long
            run_one()
        if self._error is not None:
            raise self._error

    def _try_worlds(self) -> None:
        """Lay the small specs out one by one, which an allocator of somebody's own may not survive."""
        from ...strategies.worlds import small_specs

        for spec in small_specs() if self._options.isolate else ():
            trace = Trace(spec=spec)
            self._record(encode_input(trace))
            try:
                running_cache(spec, self._options.allocator)
            except (Rejected, SpecError):
                continue
            except Exception as error:
                raise _no_cache(self._options, trace, self._chunk, error) from None

    def _ended(self) -> bool:
        full = len(self._hits.get(self._options.stop_rule or "", ())) >= STARTS
        return self._error is not None or full or self._stopped()

    def _judge(self, trace: Trace) -> None:
        """Run one trace and keep what it breaks; errors end the chunk."""
        allocator = self._options.allocator
        self._record(encode_input(trace))
        self._examples += 1
        try:
            cache = running_cache(trace.spec, allocator)
            judged = judge_trace(trace, allocator, cache)
        except Rejected as refusal:
            self._refused += 1
            if refusal.supported or refusal.rule != "rejected":
                self._keep(Finding(rule=refusal.rule, message=refusal.message, remedy=refusal.remedy), trace, 0)
            return
        except Exception as error:  # no layout, or one that a running cache chokes on
            self._error = _no_cache(self._options, trace, self._chunk, error)
            return
        self._operations += judged.verdict.done
        self._counts.count(trace, judged.verdict, frozenset(cache.seen))
        self._known += len(judged.faults) - len(judged.outside)
        try:
            for fault in judged.outside:
                self._keep(fault, trace, judged.verdict.done)
        except SpecError as error:  # a full disk
            self._error = error

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


def _no_cache(options: Options, trace: Trace, chunk: int, error: Exception) -> SpecError:
    """Return the error of a layout that no trace runs on, its trace saved."""
    if isinstance(error, SpecError):
        problem = error.problem if error.field == "allocator" else str(error)
    else:
        problem = f"gave a layout that no cache can run on ({type(error).__name__}: {error})"
    return broken_allocator(options, trace, chunk, problem)


def _case(allocator: str, trace: Trace, fault: Finding | TraceHit) -> Case:
    found = (FoundRule(rule=fault.rule, message=fault.message),)
    return Case(allocator=allocator, input=trace, found=found)


def settle(
    hits: list[TraceHit],
    options: Options,
    reduce: bool,
    record: Callable[[bytes], None] = lambda trace: None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[TraceFault, bool]:
    """Return the fault of one rule, reduced and saved, and whether Ctrl-C ended the reduction.

    The reduction begins with the smallest few of the traces that were found. ``record`` is told each trace before it is
    run, and ``stopped`` is asked whether Ctrl-C was seen.
    """
    hit = hits[0]
    starts = sorted(hits[: 2 * STARTS], key=lambda entry: trace_key(entry.trace))
    best = [starts[0]]

    def fails(candidate: Trace) -> bool:
        if stopped():
            raise KeyboardInterrupt
        record(encode_input(candidate))
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


def judge_saved_traces(options: Options, record: Callable[[bytes], None] = lambda trace: None) -> SavedCases:
    """Run the saved traces of the campaign's folder again, those of its allocator; ``record`` is told each."""
    run, failing, not_run, unreadable = [], [], [], []
    for path in case_files([options.cases] if options.cases is not None and options.cases.is_dir() else []):
        try:
            case = load_case(path)
        except SpecError:
            unreadable.append(path.name)
            continue
        if case.allocator != options.allocator or not isinstance(case.input, Trace):
            not_run.append(path.name)
            continue
        record(encode_input(case.input))
        run.append(path.name)
        saved = {entry.rule for entry in case.found}
        try:
            judged = judge_trace(case.input, case.allocator)
        except Exception:  # no layout, or one that a running cache chokes on
            failing.append(path.name)
            continue
        if saved & {fault.rule for fault in judged.faults} if saved else judged.outside:
            failing.append(path.name)
    return SavedCases(tuple(run), tuple(failing), tuple(not_run), tuple(unreadable))
