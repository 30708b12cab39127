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

import msgspec

from ..model.errors import SpecError, shown
from ..model.spec import CacheSpec, decode_spec, encode_spec
from ..sim.allocators.faulty import base_of
from ..sim.finding import Finding
from ..sim.limits import KnownLimit, limits_of
from ..sim.registry import Allocator, resolve
from ..sim.verdict import judge
from .cases import Case, FoundRule, add_case, case_files, load_case, require_folder, save_case, withdraw_case
from .determinism import CHUNK_EXAMPLES, chunk_seed, chunk_sizes, without_folder, without_local_constants
from .ledger import Coverage, Row, SavedCases, coverage_of, row_of
from .reducer import reduce_spec
from .simplicity import size


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a campaign is asked to do. ``examples`` or ``seconds`` bounds it (both: whichever ends first).

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


class ChunkResult(msgspec.Struct, frozen=True):
    """What one chunk found and covered."""

    chunk: int
    examples: int
    refused: int
    known: int
    hits: dict[str, Hit]
    rows: Counter[Row]
    classes: Counter[str]


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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole campaign: ``refused`` counts refusals, ``known`` hits on known limits; ``interrupted``: cut short."""

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


def faults_outside_limits(
    spec: CacheSpec, allocator: Allocator, limits: tuple[KnownLimit, ...]
) -> tuple[list[Finding], int, bool]:
    """Return an allocator's faults on ``spec`` outside its known limits, the number inside, and whether it refused."""
    verdict = judge(spec, allocator)
    faults = verdict.faults
    if not faults:
        return [], 0, verdict.status == "rejected"
    excused = {rule for limit in limits if limit.matches(spec) for rule in limit.rules}
    outside = [fault for fault in faults if fault.rule not in excused]
    return outside, len(faults) - len(outside), verdict.status == "rejected"


def run_campaign(options: Options, progress: Callable[[Progress], None] = lambda state: None) -> Result:
    """Run a campaign to the end of its budget, or until Ctrl-C, and return what it found.

    Raises ``SpecError`` for an unknown allocator, for a folder that cannot be written, and for an allocator that
    answers with something that is no layout or ends its worker process.
    """
    from ..strategies.rare import CLASSES, FITTING

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
    for hits in tally.rules():
        reduction = _Reduction(hits, options)
        try:
            if options.reduce and not interrupted:
                reduction.run()
        except KeyboardInterrupt:
            interrupted = True
        faults.append(reduction.save())
    family = _family(options.allocator)
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


def _family(allocator: str) -> str:
    """Return the family of specs to draw: a faulty allocator supports what the one that it varies does."""
    from ..strategies.families import family_of

    return family_of(base_of(allocator) if allocator.startswith("fault:") else allocator)


class RuleHits(msgspec.Struct):
    """A rule over all chunks: the example that first broke it, its smallest spec, and the files saved on the way."""

    rule: str
    example: int
    smallest: Hit
    saved: list[str]


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


def _merge_hits(results: list[ChunkResult]) -> list[RuleHits]:
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

    if options.workers > 1:
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
        if case.allocator != options.allocator:
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

        @seed(chunk_seed(self._options.seed, self._chunk))
        @settings(
            max_examples=examples,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(specs_for(self._options.allocator, family=_family(self._options.allocator), plain=self._options.plain))
        def judge_one(spec: CacheSpec) -> None:
            if self._ended():
                raise _Stop  # Hypothesis runs the last example once more before it ends
            self._judge(spec)
            self._rows[row_of(spec)] += 1
            self._classes.update(classes_of(spec))
            if self._ended():
                raise _Stop

        with without_local_constants(), without_folder(), contextlib.suppress(_Stop):
            judge_one()
        if self._error is not None:
            raise self._error

    def result(self) -> ChunkResult:
        """Return what the chunk has found so far."""
        return ChunkResult(
            self._chunk, self._examples, self._refused, self._known, self._hits, self._rows, self._classes
        )

    def _ended(self) -> bool:
        return self._error is not None or self._options.stop_rule in self._hits or self._stopped()

    def _judge(self, spec: CacheSpec) -> None:
        self._record(encode_spec(spec))
        try:
            faults, known, refused = faults_outside_limits(spec, self._allocator, self._limits)
        except Exception as error:  # no layout, or one that the rules choke on
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
            case = _case(self._options.allocator, spec, fault.rule, fault.message)
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


def broken_allocator(options: Options, spec: CacheSpec, chunk: int, problem: str) -> SpecError:
    """Return the one line about an allocator that breaks the campaign itself, with its spec saved as a case."""
    place = f"in chunk {chunk}" if chunk >= 0 else "on a saved case"
    if options.cases is None:
        return SpecError("allocator", f"{shown(options.allocator)} {problem} {place}")
    path = add_case(Case(allocator=options.allocator, input=spec), options.cases)
    return SpecError("allocator", f"{shown(options.allocator)} {problem} {place}, on the spec of {path}")


def _case(allocator: str, spec: CacheSpec, rule: str, message: str) -> Case:
    return Case(allocator=allocator, input=spec, found=(FoundRule(rule=rule, message=message),))


class _Reduction:
    """The simplest spec so far that breaks one rule: what the chunks found, or better."""

    def __init__(self, hits: RuleHits, options: Options) -> None:
        self._hits, self._options = hits, options
        self._limits = limits_of(options.allocator)
        self._allocator = resolve(options.allocator)
        self._spec, self._message = decode_spec(hits.smallest.spec), hits.smallest.message

    def run(self) -> None:
        """Reduce; what an allocator that changes its mind no longer breaks stays as it was found."""
        with contextlib.suppress(ValueError):
            reduce_spec(self._spec, self._fails)

    def _fails(self, candidate: CacheSpec) -> bool:
        """Say whether ``candidate`` breaks the rule; the reducer asks for simpler specs only, so keep it if it does."""
        try:
            faults, _, _ = faults_outside_limits(candidate, self._allocator, self._limits)
        except Exception:  # no layout: not this rule
            return False
        message = next((fault.message for fault in faults if fault.rule == self._hits.rule), None)
        if message is None:
            return False
        self._spec, self._message = candidate, message
        return True

    def save(self) -> Fault:
        """Save the case in place of the ones saved on the way, and return the fault."""
        rule, folder = self._hits.rule, self._options.cases
        saved = None
        if folder is not None:
            path = add_case(_case(self._options.allocator, self._spec, rule, self._message), folder)
            saved = str(path)
            for name in self._hits.saved:
                if name != path.name:
                    withdraw_case(folder / name, rule)
        return Fault(
            rule=rule,
            message=self._message,
            case=saved,
            examples_to_find=self._hits.example,
            size=size(self._spec),
            spec=self._spec,
        )


def _finish(hits: RuleHits, options: Options, limits: tuple[KnownLimit, ...]) -> Fault:
    """Return the fault of one rule: its spec reduced and saved in place of the ones saved on the way."""
    reduction = _Reduction(hits, options)
    if options.reduce:
        reduction.run()
    return reduction.save()
