"""Campaigns: draw specs, judge them, keep the simplest failure of every rule, reduce it, save it.

A campaign is a sequence of chunks of 500 examples, each with its own seed, each run by one worker. Nothing that a
chunk does depends on another chunk, so results are the same for any number of workers; a time budget only decides how
many chunks are started. The test function handed to Hypothesis never fails: failures are collected, several rules per
run, and shrunk by our own reducer.

Whatever is found is on disk at once: a worker saves the first case of each rule of its chunk as soon as it sees it,
and the reduced case replaces it at the end. An interrupted campaign leaves all of that behind. Cases that the folder
holds already, of the same allocator, are judged again before anything is drawn.

An allocator may do anything: a refusal of any kind is a verdict, an answer that is no layout ends the campaign in one
line with the spec saved, and so does the end of a worker process (``workers``), which cannot take the campaign along.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from ..model.errors import SpecError, shown
from ..model.spec import CacheSpec, encode_spec
from ..sim.allocators.faulty import base_of
from ..sim.cache.trace import Trace
from ..sim.finding import Finding
from ..sim.limits import faults_outside_limits, limits_of
from ..sim.registry import resolve
from ..sim.transfer.pair import Pair
from ..sim.verdict import judge
from .cases import Case, CaseInput, add_case, case_files, load_case, require_folder, save_case
from .determinism import CHUNK_EXAMPLES, chunk_seed, chunk_sizes, without_folder, without_local_constants
from .engines.comparison import Ahead
from .ledger import Coverage, Row, SavedCases, coverage_of, row_of
from .reduction import Fault, Hit, Reduction, RuleHits, case_of
from .simplicity import size

SAVED_CASES: Final = -1
REDUCTION: Final = -2
"""What stands for the number of the chunk where no chunk is run."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a campaign is asked to do. ``examples`` or ``seconds`` bounds it (both: whichever ends first).

    ``family`` names the specs to draw, None those that the allocator is known to support. ``isolate`` never runs the
    allocator in this process, which it might end or keep alive with threads of its own, but in worker processes alone.
    ``stop_rule`` ends it with the first example that breaks that rule, ``reduce`` shrinks what was found, ``plain``
    draws every part of a spec independently, without the recipes for rare classes (the baseline of the bench).
    """

    allocator: str
    seed: int = 0
    examples: int | None = None
    seconds: float | None = None
    workers: int = 1
    cases: Path | None = None
    stop_rule: str | None = None
    reduce: bool = True
    plain: bool = False
    family: str | None = None
    isolate: bool = False


class ChunkResult(msgspec.Struct, frozen=True):
    """What one chunk found and covered."""

    chunk: int
    examples: int
    refused: int
    known: int
    hits: dict[str, Hit]
    rows: Counter[Row]
    classes: Counter[str]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole campaign, or as much as there was before Ctrl-C (``interrupted``).

    ``refused`` counts refused examples, ``known`` findings inside known limits: one example has up to 20 of each rule.
    """

    allocator: str
    seed: int
    examples: int
    seconds: float
    refused: int
    known: int
    faults: list[Fault]
    coverage: Coverage
    interrupted: bool = False

    @property
    def nothing_checked(self) -> bool:
        """Whether every single spec was refused, so that a campaign without faults says nothing."""
        return self.examples > 0 and self.refused == self.examples


class Progress(msgspec.Struct, frozen=True):
    """Where a campaign stands: examples so far, examples per second, rules broken, and classes covered of all."""

    examples: int
    per_second: float
    rules: tuple[str, ...]
    classes_covered: int
    classes: int


def run_campaign(options: Options, progress: Callable[[Progress], None] = lambda state: None) -> Result:
    """Run a campaign to the end of its budget, or until Ctrl-C, and return what it found.

    Raises ``SpecError`` for an unknown allocator, for a folder that cannot be written, and for an allocator that
    answers with something that is no layout or ends its worker process.
    """
    from ..strategies.rare import CLASSES, FITTING

    if not options.isolate:
        resolve(options.allocator)
    if options.cases is not None:
        require_folder(options.cases, "cases")
    started = time.monotonic()
    tally = _Tally()
    interrupted = False
    try:
        for result in _results(options, started):
            tally.add(result)
            progress(tally.progress(time.monotonic() - started, len(CLASSES)))
            if options.stop_rule is not None and options.stop_rule in tally.hits:
                break
    except KeyboardInterrupt:
        interrupted = True
    faults = []
    with _reducer(options) as reduce:
        for hits in tally.rules():
            reduction = Reduction(hits, options.allocator)
            if options.reduce and not interrupted:
                interrupted = not reduce(reduction)
            faults.append(reduction.save(options.cases))
    family = _family(options)
    wanted = {name for name, families in FITTING.items() if family in families}
    return Result(
        allocator=options.allocator,
        seed=options.seed,
        examples=tally.examples,
        seconds=time.monotonic() - started,
        refused=tally.refused,
        known=tally.known,
        faults=faults,
        coverage=coverage_of(tally.rows, tally.classes, CLASSES, wanted, tally.cases),
        interrupted=interrupted,
    )


def _reducer(options: Options) -> contextlib.AbstractContextManager[Callable[[Reduction], bool]]:
    """Return what runs reductions, here or in a process of its own, and says whether each ran to its end."""
    if not options.isolate:
        return contextlib.nullcontext(Reduction.run)
    from .workers import reducing_worker

    return reducing_worker(options)


def _family(options: Options) -> str:
    """Return the family of specs to draw: a faulty allocator supports what the one that it varies does."""
    from ..strategies.families import family_of

    if options.family is not None:
        return options.family
    allocator = options.allocator
    return family_of(base_of(allocator) if allocator.startswith("fault:") else allocator)


class _Tally:
    """What the chunks so far, added in order, amount to."""

    def __init__(self) -> None:
        self.examples = self.refused = self.known = 0
        self.rows: Counter[Row] = Counter()
        self.classes: Counter[str] = Counter()
        self.hits: dict[str, RuleHits] = {}
        self.cases = SavedCases()

    def add(self, result: ChunkResult | SavedCases) -> None:
        """Add the next chunk, or what became of the saved cases."""
        if isinstance(result, SavedCases):
            self.cases = result
            return
        for rule, hit in result.hits.items():
            held = self.hits.setdefault(rule, RuleHits(rule, self.examples + hit.example, hit, []))
            if hit.size < held.smallest.size:
                held.smallest = hit
            if hit.saved is not None:
                held.saved.append(hit.saved)
        self.examples += result.examples
        self.refused += result.refused
        self.known += result.known
        self.rows.update(result.rows)
        self.classes.update(result.classes)

    def rules(self) -> list[RuleHits]:
        """Return one entry per rule, in the order in which rules were first broken."""
        return sorted(self.hits.values(), key=lambda entry: (entry.example, entry.rule))

    def progress(self, seconds: float, classes: int) -> Progress:
        """Return where the campaign stands after ``seconds``, with ``classes`` rare classes in all."""
        return Progress(self.examples, self.examples / max(seconds, 1e-9), tuple(self.hits), len(self.classes), classes)


def merge_hits(results: list[ChunkResult]) -> list[RuleHits]:
    """Return one entry per rule, in the order in which rules were first broken."""
    tally = _Tally()
    for result in results:
        tally.add(result)
    return tally.rules()


def _results(options: Options, started: float) -> Iterator[ChunkResult | SavedCases]:
    """Yield what became of the saved cases, then the results of chunks in order, from here or from workers.

    No chunk is started after the time budget. On Ctrl-C the chunks begun are yielded as far as they got, and
    ``KeyboardInterrupt`` is raised after them.
    """

    def tasks() -> Iterator[tuple[int, int]]:
        for task in _chunks(options):
            if options.seconds is not None and time.monotonic() - started >= options.seconds:
                return
            yield task

    if options.workers > 1 or options.isolate:
        from .workers import results_of_workers

        yield from results_of_workers(options, tasks())
        return
    yield judge_saved_cases(options)
    for chunk, examples in tasks():
        run = Chunk(options, chunk)
        try:
            run.run(examples)
        except KeyboardInterrupt:
            yield run.result()
            raise
        yield run.result()


def _chunks(options: Options) -> Iterator[tuple[int, int]]:
    """Yield (chunk, examples) of the campaign; without an example budget there is no end."""
    if options.examples is not None:
        yield from enumerate(chunk_sizes(options.examples))
        return
    chunk = 0
    while True:
        yield chunk, CHUNK_EXAMPLES
        chunk += 1


def judge_saved_cases(options: Options, record: Callable[[bytes], None] = lambda spec: None) -> SavedCases:
    """Judge the saved cases of the campaign's folder again, those of its allocator; ``record`` is told each spec.

    A case fails while it breaks a rule that it was saved for, or, naming none, any rule outside known limits.
    """
    run, failing, not_run, unreadable = [], [], [], []
    limits = limits_of(options.allocator)
    for path in case_files([options.cases] if options.cases is not None and options.cases.is_dir() else []):
        try:
            case = load_case(path)
        except SpecError:
            unreadable.append(path.name)
            continue
        if case.allocator != options.allocator or not isinstance(case.input, CacheSpec):
            not_run.append(path.name)
            continue
        record(encode_spec(case.input))
        run.append(path.name)
        saved = {entry.rule for entry in case.found}
        try:
            outside = {fault.rule for fault in faults_outside_limits(case.input, resolve(case.allocator), limits)[0]}
            inside = {fault.rule for fault in judge(case.input, case.allocator).faults}
        except Exception:  # an answer that is no layout
            failing.append(path.name)
            continue
        if saved & inside if saved else outside:
            failing.append(path.name)
    return SavedCases(tuple(run), tuple(failing), tuple(not_run), tuple(unreadable))


class _Stop(Exception):
    """Ends a chunk from inside its test function."""


def run_chunk(options: Options, chunk: int, examples: int) -> ChunkResult:
    """Run one chunk and return what it found; cases of new rules are saved on the way."""
    run = Chunk(options, chunk)
    run.run(examples)
    return run.result()


class Chunk:
    """One chunk while it runs.

    ``record`` is told each spec before it is judged, and ``stopped`` is asked whether to end before the next.
    """

    def __init__(
        self,
        options: Options,
        chunk: int,
        record: Callable[[bytes], None] = lambda spec: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._options = options
        self._chunk = chunk
        self._record = record
        self._stopped = stopped
        self._limits = limits_of(options.allocator)
        self._allocator = resolve(options.allocator)
        self._started = time.monotonic()
        self._examples = self._refused = self._known = 0
        self._hits: dict[str, Hit] = {}
        self._rows: Counter[Row] = Counter()
        self._classes: Counter[str] = Counter()
        self._error: SpecError | None = None

    def run(self, examples: int) -> None:
        """Draw and judge ``examples`` specs; raise ``SpecError`` for an allocator that gives no layout."""
        from hypothesis import HealthCheck, Phase, given, seed, settings

        from ..strategies.rare import classes_of
        from ..strategies.specs import specs_for

        ahead = Ahead(self._allocator)

        @seed(chunk_seed(self._options.seed, self._chunk))
        @settings(
            max_examples=examples,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(specs_for(self._drawn_as(), family=_family(self._options), plain=self._options.plain))
        def judge_one(spec: CacheSpec) -> None:
            if self._ended():
                raise _Stop  # Hypothesis runs the last example once more before it ends
            for drawn in ahead.take(spec):
                judge_drawn(drawn)

        def judge_drawn(spec: CacheSpec) -> None:
            self._judge(spec)
            self._rows[row_of(spec)] += 1
            self._classes.update(classes_of(spec))
            if self._ended():
                raise _Stop

        with without_local_constants(), without_folder(), contextlib.suppress(_Stop):
            judge_one()
            for drawn in ahead.rest():
                judge_drawn(drawn)
        if self._error is not None:
            raise self._error

    def result(self) -> ChunkResult:
        """Return what the chunk has found so far."""
        return ChunkResult(
            self._chunk, self._examples, self._refused, self._known, self._hits, self._rows, self._classes
        )

    def _drawn_as(self) -> str:
        """Return the allocator whose specs are drawn: an installed engine says which model is its own."""
        return str(getattr(self._allocator, "drawn_as", self._options.allocator))

    def _ended(self) -> bool:
        return self._error is not None or self._options.stop_rule in self._hits or self._stopped()

    def _judge(self, spec: CacheSpec) -> None:
        self._record(encode_spec(spec))
        try:
            faults, known, refused = faults_outside_limits(spec, self._allocator, self._limits)
        except Exception as error:  # no layout, or one that the rules choke on
            if isinstance(error, SpecError) and error.field == "engine":  # it cannot be started: no spec is to blame
                self._error = error
                raise _Stop from None
            self._error = self._no_layout(spec, error)
            raise _Stop from None
        self._examples += 1
        self._known += known
        self._refused += refused
        try:
            for fault in faults:
                self._keep(fault, spec)
        except SpecError as error:  # a full disk
            self._error = error
            raise _Stop from None

    def _no_layout(self, spec: CacheSpec, error: Exception) -> SpecError:
        """Return the error of an answer that cannot be judged, its spec saved."""
        if isinstance(error, SpecError):
            problem = error.problem if error.field == "allocator" else str(error)
        else:
            problem = f"gave a layout that cannot be checked ({type(error).__name__}: {error})"
        return broken_allocator(self._options, spec, self._chunk, problem)

    def _keep(self, fault: Finding, spec: CacheSpec) -> None:
        """Remember a failure: the first of its rule (saved at once), then any smaller one."""
        held = self._hits.get(fault.rule)
        spec_size = size(spec)
        if held is None:
            folder = self._options.cases
            case = case_of(self._options.allocator, spec, fault.rule, fault.message)
            saved = None
            if folder is not None and not (folder / case.file_name).exists():
                saved = save_case(case, folder).name
            seconds = time.monotonic() - self._started
            self._hits[fault.rule] = Hit(
                fault.rule, self._examples, fault.message, encode_spec(spec), spec_size, seconds, saved
            )
        elif spec_size < held.size:
            self._hits[fault.rule] = msgspec.structs.replace(
                held, message=fault.message, spec=encode_spec(spec), size=spec_size
            )


def broken_allocator(options: Options, judged: CaseInput, chunk: int, problem: str) -> SpecError:
    """Return the one line about an allocator that breaks the campaign itself, with its input saved as a case."""
    place = {SAVED_CASES: "on a saved case", REDUCTION: "while a case is reduced"}.get(chunk, f"in chunk {chunk}")
    if options.cases is None:
        return SpecError("allocator", f"{shown(options.allocator)} {problem} {place}")
    path = add_case(Case(allocator=options.allocator, input=judged), options.cases)
    noun = {Trace: "trace", Pair: "pair"}.get(type(judged), "spec")
    return SpecError("allocator", f"{shown(options.allocator)} {problem} {place}, on the {noun} of {path}")
