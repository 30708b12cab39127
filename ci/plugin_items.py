"""What the pytest plugin collects: one item for each saved case, and a fixed number of items for each campaign.

Items depend on the options and on the case files alone, so all workers of pytest-xdist collect the same. They hang
directly below the session, not below folders: no ``conftest.py`` or ``__init__.py`` beside a stranger's cases is run.

Part ``k`` of ``PARTS`` of a campaign runs the chunks ``k - 1``, ``k - 1 + PARTS``, ... Its chunks and seeds are those
of ``kvsan fuzz`` with the same seed. A budget in seconds is wall-clock time of the whole campaign: the parts share it,
times the workers that run them side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import pytest

from ..model.errors import SpecError, shown
from ..model.spec import CacheSpec
from ..sim.cache.names import layout_allocator
from ..sim.cache.trace import Trace
from ..sim.finding import Finding, Where
from ..sim.limits import limits_of
from ..sim.registry import resolve
from ..sim.spec_words import describe_spec
from ..sim.transfer.pair import Pair
from ..sim.transfer.words import describe_pair
from ..sim.verdict import judge
from .campaign import ChunkResult, Options, merge_hits, run_chunk
from .cases import Case, case_allocator, case_files, load_case
from .determinism import CHUNK_EXAMPLES, chunk_sizes
from .profiles import Profile, profile_named
from .reduction import Fault, Reduction

MakesReport: TypeAlias = Generator[None, pytest.CollectReport, pytest.CollectReport]

PARTS: Final = 8
"""Test items of a campaign, where it has as many chunks."""
MAX_SHOWN_CHARACTERS: Final = 800


class Request(msgspec.Struct, frozen=True):
    """What the command line asks for. ``workers`` are the pytest processes that run items side by side."""

    case_paths: tuple[Path, ...]
    profile: Profile | None
    allocators: tuple[str, ...]
    save: Path | None
    seed: int
    workers: int


def collection_of(config: pytest.Config) -> Collection:
    """Return the plugin that collects what the options ask for; raise ``pytest.UsageError`` of one line for others."""
    here = config.invocation_params.dir
    given = tuple(dict.fromkeys(config.getoption("kvsan_allocator")))
    case_paths = tuple([here.joinpath(path) for path in config.getoption("kvsan_cases")])
    for path in case_paths:
        if not path.exists():
            raise pytest.UsageError(f"--kvsan-cases {printable(str(path))}: no such file or folder")
    profile = None
    name = config.getoption("kvsan_profile")
    try:
        if name is not None:
            profile = profile_named(name)
        for allocator in given:
            _check_name(allocator)
    except SpecError as error:
        raise pytest.UsageError(printable(f"--kvsan-{error.field}: {error.problem}")) from None
    if profile is not None and not given:
        raise pytest.UsageError(f"--kvsan-profile {profile.name} needs an allocator to fuzz: --kvsan-allocator NAME")
    if any(_is_own(allocator) for allocator in given) and str(here) not in sys.path:
        sys.path.insert(0, str(here))  # as `python -m pytest` and `kvsan check` do
    save = config.getoption("kvsan_save")
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    return Collection(
        Request(
            case_paths,
            profile,
            given,
            None if save is None else here.joinpath(save),
            config.getoption("kvsan_seed"),
            workers,
        )
    )


def _is_own(allocator: str) -> bool:
    return ":" in allocator and not allocator.startswith("fault:")


def _check_name(allocator: str) -> None:
    """Refuse names that cannot be an allocator; the user's own modules are imported when an item runs, not before."""
    if not _is_own(allocator):
        resolve(allocator)
    elif allocator.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        raise SpecError(
            "allocator",
            f"{shown(allocator)} is part of Python's own library, needs a Python function that takes a CacheSpec "
            "and returns a Layout",
        )


class Collection:
    """The hook that adds the items to a session."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> MakesReport:
        """Add the collectors below the session itself, after everything else."""
        report = yield
        if isinstance(collector, pytest.Session) and report.outcome == "passed":
            report.result = [*report.result, *self._collectors(collector)]
        return report

    def _collectors(self, session: pytest.Session) -> Iterator[pytest.Collector]:
        request = self._request
        for path in dict.fromkeys(map(_absolute, case_files(request.case_paths))):
            name = printable(os.path.relpath(path, session.config.rootpath)).replace(os.sep, "/")
            yield CaseFile.from_parent(session, name=name, nodeid=name, case_path=path, given=request.allocators)
        if request.profile is not None:
            parts = part_count(request.profile)
            for part in range(parts):
                name = f"kvsan-{request.profile.name}-{part + 1}-of-{parts}"
                yield CampaignPart.from_parent(
                    session, name=name, nodeid=name, request=request, profile=request.profile, part=part
                )


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def part_count(profile: Profile) -> int:
    """Return the items of a campaign: fixed by the profile, so that all workers agree."""
    return PARTS if profile.examples is None else max(1, min(PARTS, len(chunk_sizes(profile.examples))))


class CaseFile(pytest.Collector):
    """One case file: a single item, named by the case's allocator."""

    def __init__(self, *, case_path: Path, given: tuple[str, ...], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._path, self._given = case_path, given

    def collect(self) -> Iterator[CaseItem]:
        """Yield the item; what is wrong with the file is the item's error."""
        case, error = None, ""
        try:
            case = load_case(self._path)
            name = printable(shortened(case.allocator, 100))
        except SpecError as unreadable:
            name, error = "unreadable", str(unreadable)
        yield CaseItem.from_parent(self, name=name, case_path=self._path, case=case, error=error, given=self._given)


class CampaignPart(pytest.Collector):
    """One part of the campaigns: an item for each allocator.

    Each part is a collector of its own, because ``pytest -n 2 --dist loadfile`` keeps the items of one together.
    """

    def __init__(self, *, request: Request, profile: Profile, part: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._request, self._profile, self._part = request, profile, part

    def collect(self) -> Iterator[CampaignItem]:
        """Yield the items."""
        for allocator in self._request.allocators:
            yield CampaignItem.from_parent(
                self,
                name=printable(allocator),
                allocator=allocator,
                request=self._request,
                profile=self._profile,
                part=self._part,
            )


class CaseItem(pytest.Item):
    """A saved case, judged again: it fails while it breaks a rule."""

    def __init__(
        self, *, case_path: Path, case: Case | None, error: str, given: tuple[str, ...], **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.add_marker("kvsan")
        self._path, self._case, self._error, self._given = case_path, case, error, given
        self._allocator = ""

    def setup(self) -> None:
        """Find the case's allocator; whatever keeps the case from being judged is an error, in one line."""
        with one_line_errors():
            if self._case is None:
                raise SpecError("", self._error)
            self._allocator = _permitted(self._case, self._given)
            if isinstance(self._case.input, Pair):
                from .transfer_judging import require_transfer

                require_transfer(self._allocator)
            else:
                _load(self._allocator)

    def runtest(self) -> None:
        """Judge the case again."""
        case = self._case
        if case is None:
            return
        with one_line_errors():
            faults = faults_of_case(case, self._allocator)
        if faults:
            again = f"kvsan check {os.path.relpath(self._path)}"
            if _is_own(self._allocator):
                again += f" --allocator {self._allocator}"
            lines = [*described(faults), spelled_input(case), f"run again: {printable(again)}"]
            raise pytest.fail.Exception("\n".join(lines), pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the case file, and the headline of a failure."""
        return self._path, None, f"kvsan case {self.nodeid}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return what went wrong, without the frames of pytest."""
        return _from_here_on(excinfo) or super().repr_failure(excinfo, style)


def _permitted(case: Case, given: tuple[str, ...]) -> str:
    """Return the case's allocator; code that only the case names is never loaded."""
    try:
        return case_allocator(case, case.allocator if case.allocator in given else None)
    except SpecError:
        raise SpecError(
            "allocator",
            f"the case names {shown(case.allocator)}, and code is never loaded because a file says so: give "
            f"--kvsan-allocator {shortened(case.allocator, 100)} as well if you trust it",
        ) from None


def _load(allocator: str) -> None:
    try:
        resolve(layout_allocator(allocator))
    except SystemExit:
        raise SpecError("allocator", f"cannot import {shown(allocator)}: it left the process (SystemExit)") from None


def faults_of_case(case: Case, allocator: str) -> list[Finding]:
    """Return what is still wrong with a case: the rules it was saved for, and others outside known limits."""
    saved = {entry.rule for entry in case.found}
    if isinstance(case.input, Trace):
        from .traces.judging import judge_trace

        judged = judge_trace(case.input, allocator)
        return [fault for fault in judged.faults if fault.rule in saved or fault not in judged.excused]
    if isinstance(case.input, Pair):
        from .transfer_judging import judge_transfer

        moved = judge_transfer(case.input, allocator)
        return [fault for fault in moved.faults if fault.rule in saved or fault not in moved.excused]
    faults = judge(case.input, allocator).faults
    limits = [limit for limit in limits_of(allocator) if limit.matches(case.input)]
    return [fault for fault in faults if fault.rule in saved or not any(limit.excuses(fault) for limit in limits)]


class CampaignItem(pytest.Item):
    """One part of a campaign with one allocator: it fails when any of its examples breaks a rule."""

    def __init__(self, *, allocator: str, request: Request, profile: Profile, part: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_marker("kvsan")
        self._profile, self._part, self._workers = profile, part, request.workers
        self._options = Options(allocator=allocator, seed=request.seed, cases=request.save)

    def setup(self) -> None:
        """Find the allocator."""
        with one_line_errors():
            _load(self._options.allocator)

    def runtest(self) -> None:
        """Run the chunks of this part, then reduce what they found."""
        options = self._options
        chunks = chunks_of_part(self._profile, self._part, self._workers)
        with one_line_errors():
            results = [run_chunk(options, chunk, examples) for chunk, examples in chunks]
            faults = faults_of_chunks(results, options)
        examples, refused = sum(result.examples for result in results), sum(result.refused for result in results)
        self.user_properties += [("kvsan_examples", examples), ("kvsan_refused", refused)]
        head = f"{options.allocator}: {examples} examples of profile {self._profile.name}, seed {options.seed}, part "
        head += self.parent.name.removeprefix(f"kvsan-{self._profile.name}-") if self.parent else ""
        if faults:
            lines = [line for fault in faults for line in _described_fault(fault, options.allocator)]
            raise pytest.fail.Exception("\n".join([*lines, head]), pytrace=False)
        if examples == refused:
            text = f"nothing was checked: {printable(options.allocator)} refused every spec\n{head}"
            raise pytest.fail.Exception(text, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return no file of its own, and the headline of a failure."""
        return self.config.rootpath, None, f"kvsan campaign {self.nodeid}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return what went wrong, without the frames of pytest."""
        return _from_here_on(excinfo) or super().repr_failure(excinfo, style)


def chunks_of_part(profile: Profile, part: int, workers: int) -> Iterator[tuple[int, int]]:
    """Yield the (chunk, examples) of one part.

    One with a time budget has a chunk at least, and ends where another chunk would be further from its share of the
    time than none: chunks are never cut short.
    """
    parts = part_count(profile)
    if profile.examples is not None:
        yield from list(enumerate(chunk_sizes(profile.examples)))[part::parts]
        return
    share = (profile.seconds or 0) * min(workers, parts) / parts
    started = time.monotonic()
    for done in itertools.count():
        if done:
            elapsed = time.monotonic() - started
            if elapsed + elapsed / (2 * done) >= share:
                return
        yield part + done * parts, CHUNK_EXAMPLES


def faults_of_chunks(results: list[ChunkResult], options: Options) -> list[Fault]:
    """Return one fault per rule that the chunks broke, each reduced and saved."""
    faults = []
    for hits in merge_hits(results):
        reduction = Reduction(hits, options.allocator)
        if not reduction.run():
            raise KeyboardInterrupt
        faults.append(reduction.save(options.cases))
    return faults


def _described_fault(fault: Fault, allocator: str) -> list[str]:
    """Return what a reader needs of a fault: the finding on the reduced spec, the spec, and how to run it again."""
    found = [finding for finding in judge(fault.spec, allocator).faults if finding.rule == fault.rule]
    lines = described(found) if found else [printable(f"{fault.rule}: {fault.message}")]
    lines.append(f"  spec: {spelled(fault.spec)}")
    if fault.case is not None:
        lines.append(f"  saved: {printable(os.path.relpath(fault.case))}")
    return lines


def described(faults: Sequence[Finding]) -> list[str]:
    """Return the first finding of each rule, with its places and remedy, and how many more there are."""
    lines = []
    for rule in dict.fromkeys(fault.rule for fault in faults):
        first, *more = [fault for fault in faults if fault.rule == rule]
        lines.append(f"{rule}: {first.message}")
        lines += [f"  where: {_place(where)}" for where in first.where[:4]]
        lines.append(f"  remedy: {first.remedy}")
        if more:
            lines.append(f"  and {len(more)} more of this rule")
    return [printable(line) for line in lines]


def _place(where: Where) -> str:
    """Return a place in a few words: layer and role, pool, slot, bytes from the pool's base."""
    words = [
        "" if where.layer is None else f"layer {where.layer}",
        where.role or "",
        "" if where.consumer is None else f"by the {where.consumer}",
        "" if where.pool is None else f"in {where.manager or 'target'} pool {where.pool} of group {where.group}",
        "" if where.slot is None else f"slot {where.slot}",
        "" if where.first_byte is None else f"bytes {where.first_byte} to {where.last_byte}",
    ]
    return " ".join(filter(None, words)) or f"{where.manager} manager"


def spelled_input(case: Case) -> str:
    """Return what a case is about on one line: its kind, and the spec, the trace's spec or the pair."""
    value = case.input
    if isinstance(value, Pair):
        return f"pair: {printable(shortened('; '.join(describe_pair(value)), MAX_SHOWN_CHARACTERS))}"
    if isinstance(value, Trace):
        return f"trace of {len(value.operations)} operations, spec: {spelled(value.spec)}"
    return f"spec: {spelled(value)}"


def spelled(spec: CacheSpec) -> str:
    """Return a spec on one line, as ``kvsan fuzz`` describes it.

    >>> from kvsan.model.spec import AttentionLayer, CacheSpec
    >>> spelled(CacheSpec(layers=(AttentionLayer(kv_heads=8, head_dim=64),) * 3, kv_format="fp8"))
    'KV fp8, 32 tokens per block, tp1, 4 slots; layers 0-2: attention, 8 KV heads x 64'
    """
    return printable(shortened("; ".join(describe_spec(spec)), MAX_SHOWN_CHARACTERS))


def shortened(text: str, characters: int) -> str:
    """Return ``text`` with its end left out where it is longer."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def printable(text: str) -> str:
    """Return ``text`` on one line, with escapes in place of control characters and of what cannot be encoded."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn bad input into a failure of one line, without a traceback of ours."""
    try:
        yield
    except SpecError as error:
        raise pytest.fail.Exception(printable(str(error)), pytrace=False) from None


def _from_here_on(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the traceback of an unforeseen error from this module on; empty for an outcome that was meant."""
    if isinstance(excinfo.value, pytest.fail.Exception):
        return ""
    frames = excinfo.tb
    while frames.tb_next is not None and frames.tb_frame.f_code.co_filename != __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(excinfo.type, excinfo.value, frames))
