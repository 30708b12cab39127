"""What ``kvsan replay`` does once its options are known."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from ..ci.cases import case_files
from ..ci.replay.messages import Answer, TraceWork
from ..ci.replay.supervisor import Crash, Options, Supervisor
from ..ci.replay.verdict import disagreements
from ..model.errors import SpecError, require_choice, shown, shown_path
from ..model.spec import CacheSpec
from ..sim.cache.names import layout_allocator
from ..sim.cache.trace import Trace
from ..sim.finding import Finding
from ..sim.layout import Layout
from ..sim.registry import resolve
from ..sim.rejection import Rejected
from ..sim.transfer.pair import Pair
from .allocator_choice import choose_allocator
from .deployment import Given, deploy_model, read_deployment, read_model
from .examination import NamedAllocator, laid_out
from .output import PATIENCE_SECONDS, print_report, stdout_kept, terminal, write_json
from .saved_case import read_saved_case
from .status import CLEAN, INTERRUPTED, WRONG

_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Subject(msgspec.Struct, frozen=True):
    """A case to replay: its path as given, and the spec with its allocator, or why it is refused."""

    path: str
    spec: CacheSpec | Trace | None
    allocator: NamedAllocator | None
    refusal: str | None = None


class Replay(msgspec.Struct, frozen=True):
    """What became of one case: clean, findings, rejected (by its allocator) or refused (by the replay)."""

    case: str
    allocator: str
    status: str
    digest: str | None
    findings: tuple[Finding, ...]
    message: str | None = None
    notes: tuple[str, ...] = ()
    bytes: int = 0


def replay_cases(
    cases: list[str],
    device: str,
    allocator: str | None,
    workers: str,
    max_memory: str,
    static: bool,
    sanitizer: bool,
    json: bool,
) -> int:
    """Replay ``cases`` and report them; return the exit status."""
    require_choice("--device", device, ("cpu", "cuda"))
    options = Options(
        device=device,
        max_bytes=read_bytes("--max-memory", max_memory),
        workers=_whole("--workers", workers, 64),
        wrapper=_sanitizer(device) if sanitizer else (),
    )
    paths = list(case_files([Path(case) for case in cases]))
    if not paths:
        raise SpecError("CASE_OR_DIR", f"no case in {', '.join(shown_path(case) for case in cases)}")
    started = time.monotonic()
    replays: list[Replay] = []
    interrupted = False
    with stdout_kept(), Supervisor(options) as supervisor:
        try:
            for replay in _replayed(supervisor, _subjects(paths, allocator), static):
                replays.append(replay)
                _show(len(replays), len(paths), started)
        except KeyboardInterrupt:
            interrupted = True
    _show_nothing()
    hello = supervisor.hello
    document: dict[str, Any] = {
        "device": device,
        "cases": replays,
        "device_name": "" if hello is None else hello.device,
        "versions": {} if hello is None else hello.versions,
        "seconds": round(time.monotonic() - started, 3),
        "interrupted": interrupted,
    }
    if json:
        write_json(document)
    else:
        from .report_replay import report_replays

        console = terminal()
        report_replays(console, replays, document)
        print_report(console)
    if interrupted:
        return INTERRUPTED
    return CLEAN if all(replay.status == "clean" for replay in replays) else WRONG


def read_bytes(option: str, text: str) -> int:
    """Return a number of bytes such as ``1048576``, ``256MiB`` or ``64GiB``; raise ``SpecError`` naming the option."""
    match = re.fullmatch(r"([0-9]{1,18})\s*(KiB|MiB|GiB)?", text)
    value = int(match[1]) * _UNITS[match[2] or ""] if match else 0
    if not 1 <= value <= 1 << 50:
        raise SpecError(option, f"found {shown(text)}, needs a whole number of bytes, or of KiB, MiB or GiB")
    return value


def _whole(option: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= most):
        raise SpecError(option, f"found {shown(text)}, needs a whole number from 1 to {most}")
    return int(text)


def _sanitizer(device: str) -> tuple[str, ...]:
    """Return the words that run a command under compute-sanitizer."""
    if device != "cuda":
        raise SpecError("--sanitizer", "watches CUDA kernels, needs --device cuda")
    found = shutil.which("compute-sanitizer")
    if found is None:
        raise SpecError("--sanitizer", "found no compute-sanitizer on the PATH; it comes with the CUDA toolkit")
    return (found, "--tool", "memcheck", "--error-exitcode", "86", "--target-processes", "all")


def _subjects(paths: list[Path], allocator: str | None) -> Iterator[Subject]:
    """Yield what is to be replayed; a file among many that is no case is refused, and the others go on."""
    for path in paths:
        try:
            yield _subject(path, allocator)
        except SpecError as error:
            if len(paths) == 1:
                raise
            yield Subject(str(path), None, None, str(error))


def _subject(path: Path, allocator: str | None) -> Subject:
    saved = read_saved_case(str(path), allocator)
    if saved is not None:
        if isinstance(saved.case.input, Trace):
            return Subject(str(path), saved.case.input, _cache_of(saved.allocator))
        if isinstance(saved.case.input, Pair):
            raise SpecError(shown_path(path), "the case of a pair of deployments, use: kvsan peers CASE --replay")
        return Subject(str(path), saved.case.input, choose_allocator(saved.allocator, saved.case.input))
    given: Given = {}
    loaded = deploy_model(read_model(str(path)), read_deployment(given), given, str(path))
    return Subject(str(path), loaded.spec, choose_allocator(allocator, loaded.spec))


def _cache_of(allocator: str) -> NamedAllocator:
    """Return the allocator of a running cache; the process that replays it knows it by its name."""
    if ":" in allocator and not allocator.startswith("fault:"):
        raise SpecError("--allocator", f"found {shown(allocator)}: traces of own allocators cannot be replayed")
    return NamedAllocator(allocator, resolve(layout_allocator(allocator)), False)


def _replayed(supervisor: Supervisor, subjects: Iterator[Subject], static: bool) -> Iterator[Replay]:
    """Yield what became of ``subjects`` in their order; those that have no layout never reach the device."""
    before: list[list[Replay]] = [[]]
    laid: list[Subject] = []

    def works() -> Iterator[Layout | TraceWork]:
        for subject in subjects:
            work = _work(subject, before[-1])
            if work is not None:
                laid.append(subject)
                before.append([])
                yield work

    place = 0
    for place, result in enumerate(supervisor.replay(works()), 1):
        yield from before[place - 1]
        yield _replay(laid[place - 1], result, static)
    yield from before[place] if place < len(before) else []


def _work(subject: Subject, without: list[Replay]) -> Layout | TraceWork | None:
    """Return the layout or trace of ``subject``; where there is none, add why to ``without``."""
    if subject.spec is None or subject.allocator is None:
        without.append(Replay(subject.path, "", "refused", None, (), subject.refusal))
        return None
    name = subject.allocator.name
    if isinstance(subject.spec, Trace):
        return TraceWork(subject.spec, name)
    try:
        return laid_out(subject.spec, subject.allocator)
    except Rejected as rejection:
        finding = Finding(
            rule=rejection.rule, message=rejection.message, remedy=rejection.remedy, where=rejection.where
        )
        without.append(Replay(subject.path, name, "rejected", None, (finding,), rejection.message))
    except SpecError as error:
        without.append(Replay(subject.path, name, "refused", None, (), str(error)))
    return None


def _replay(subject: Subject, result: Answer | Crash, static: bool) -> Replay:
    name = "" if subject.allocator is None else subject.allocator.name
    if isinstance(result, Crash):
        return Replay(subject.path, name, "findings", None, (result.finding,))
    if result.refusal is not None:
        return Replay(subject.path, name, "refused", None, (), result.refusal)
    findings = (*result.findings, *(disagreements(result) if static else ()))
    status = "findings" if findings else "clean"
    return Replay(subject.path, name, status, result.digest, findings, notes=result.notes, bytes=result.size_bytes)


def _show(done: int, total: int, started: float) -> None:
    """Show progress on the standard error, where somebody watches and the work takes its time."""
    seconds = time.monotonic() - started
    if sys.stderr is not None and sys.stderr.isatty() and seconds > PATIENCE_SECONDS:
        print(f"\r{done:,} of {total:,} cases, {done / seconds:,.0f} per second", end="", file=sys.stderr, flush=True)


def _show_nothing() -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def summary(replays: list[Replay]) -> Counter[str]:
    """Return how many cases there are of each status."""
    return Counter([replay.status for replay in replays])
