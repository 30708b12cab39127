"""Chunks on worker processes, which may be interrupted, or taken down by an allocator, without losing what they found.

Each worker writes down the spec, trace or pair that it is about to judge, in a chunk as in a reduction. When a process
ends in the middle (an allocator in C that crashes, ``os._exit``, no memory left), that input is tried once more in a
process of its own, so that the message can name it. Ctrl-C and SIGTERM reach the workers too: they end before their
next example and hand over what they have.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ..model.errors import SpecError, shown
from ..model.spec import decode_spec, encode_spec
from ..sim.cache.names import layout_allocator
from ..sim.cache.trace import Trace
from ..sim.registry import resolve
from ..sim.transfer.names import transfer_named
from ..sim.transfer.pair import Pair
from ..sim.transfer.planning import SOUND
from ..sim.verdict import judge
from .campaign import REDUCTION, SAVED_CASES, Chunk, ChunkResult, Options, broken_allocator, judge_saved_cases
from .cases import CaseInput, decode_input
from .ledger import SavedCases
from .reduction import Reduction, RuleHits

T = TypeVar("T")

GRACE_SECONDS: Final = 3
"""How long interrupted workers may take to end their example."""
TRIAL_SECONDS: Final = 60
"""How long the spec of a dead worker may take when it is tried again."""

_LOADING: Final = "loading"
"""The file that is there while a worker imports the allocator."""

_INTERRUPTS: Final = frozenset((signal.SIGINT, signal.SIGTERM))

_interrupted = False


class Failure(msgspec.Struct, frozen=True):
    """A ``SpecError`` on its way from a worker: exceptions with arguments of their own do not travel."""

    field: str
    problem: str


def results_of_workers(options: Options, tasks: Iterator[tuple[int, int]]) -> Iterator[ChunkResult | SavedCases]:
    """Yield what became of the saved cases, then the results of ``tasks`` in order."""
    return results_of(options, tasks, _judge_cases, _run_chunk)


def results_of(
    options: Options,
    tasks: Iterator[tuple[int, int]],
    judge_cases: Callable[[Options, str], SavedCases | Failure],
    run_chunk: Callable[[Options, int, int, str], T | Failure],
) -> Iterator[T | SavedCases]:
    """Yield what ``judge_cases`` says of the saved cases, then what ``run_chunk`` makes of ``tasks`` in order; both are
    run by workers, and given the folder of their notes.

    On Ctrl-C the chunks begun are yielded as far as they got, and ``KeyboardInterrupt`` is raised after them.
    """
    with Workers(options, options.workers) as workers:
        workers.result(workers.submit(_load, options.allocator, str(workers.notes)))
        yield workers.result(workers.submit(judge_cases, options, str(workers.notes)))
        waiting: list[concurrent.futures.Future[T | Failure]] = []
        try:
            while True:
                while len(waiting) <= options.workers and (task := next(tasks, None)) is not None:
                    waiting.append(workers.submit(run_chunk, options, *task, str(workers.notes)))
                if not waiting:
                    return
                result = workers.result(waiting[0])
                waiting.pop(0)
                yield result
        except KeyboardInterrupt:
            yield from workers.interrupted(waiting)
            raise


@contextlib.contextmanager
def reducing_worker(options: Options) -> Iterator[Callable[[Reduction], bool]]:
    """Yield a function that runs a reduction in a worker process, and says whether it ran to its end."""
    with Workers(options, 1) as workers:

        def reduce(reduction: Reduction) -> bool:
            future = workers.submit(_reduce, reduction.hits, reduction.allocator, str(workers.notes))
            try:
                reduced = workers.result(future)
            except KeyboardInterrupt:
                for reduced in workers.interrupted([future]):
                    reduction.spec, reduction.message = decode_spec(reduced.spec), reduced.message
                return False
            reduction.spec, reduction.message = decode_spec(reduced.spec), reduced.message
            return reduced.to_the_end

        yield reduce


class _Reduced(msgspec.Struct, frozen=True):
    """What a reduction came to, on its way from a worker."""

    spec: bytes
    message: str
    to_the_end: bool


class Workers:
    """``count`` worker processes of a campaign; none is left behind, however it ends."""

    def __init__(self, options: Options, count: int) -> None:
        self._options = options
        self._others = set(multiprocessing.active_children())
        self.notes = Path(tempfile.mkdtemp(prefix="kvsan-workers-"))
        self._pool = concurrent.futures.ProcessPoolExecutor(
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(str(self.notes),),
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with _interrupts_held():  # an impatient second Ctrl-C would leave processes and notes behind
            self._pool.shutdown(wait=False, cancel_futures=True)
            mine = self._processes()
            for process in mine:
                process.kill()
            for process in mine:
                process.join(GRACE_SECONDS)
            shutil.rmtree(self.notes, ignore_errors=True)

    def _processes(self) -> list[multiprocessing.process.BaseProcess]:
        return [process for process in multiprocessing.active_children() if process not in self._others]

    def submit(self, function: Callable[..., T], *arguments: object) -> concurrent.futures.Future[T]:
        """Hand a task to the workers, starting one if need be."""
        try:
            with _interrupts_held():
                return self._pool.submit(function, *arguments)
        except BrokenProcessPool:
            raise self._obituary() from None

    def result(self, future: concurrent.futures.Future[T | Failure]) -> T:
        """Return what a task returned; raise ``SpecError`` for what went wrong."""
        try:
            result = future.result()
        except BrokenProcessPool:
            raise self._obituary() from None
        if isinstance(result, Failure):
            raise SpecError(result.field, result.problem)
        return result

    def interrupted(self, waiting: list[concurrent.futures.Future[T | Failure]]) -> Iterator[T]:
        """Yield what the tasks begun came to; a worker that does not end its example in time is given up."""
        for process in self._processes():
            with contextlib.suppress(OSError, TypeError):
                os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
        begun = [future for future in waiting if not future.cancel()]
        concurrent.futures.wait(begun, GRACE_SECONDS)
        for future in begun:
            if future.done() and future.exception() is None:
                result = future.result()
                if not isinstance(result, Failure):
                    yield result

    def _obituary(self) -> SpecError:
        """Return the one line about a worker process that ended, naming the input that ends it again."""
        name = shown(self._options.allocator)
        if (self.notes / _LOADING).exists():
            return SpecError("allocator", f"{name} ends the process while it is imported")
        notes = sorted(self.notes.iterdir())
        for note in notes:
            try:
                judged = decode_input(note.read_bytes())
            except (OSError, SpecError):
                continue
            code = _exit_code(self._options.allocator, judged)
            if code != 0:
                ended = f"status {code}" if code is not None and code > 0 else f"signal {-(code or 0)}"
                problem = "does not end" if code is None else f"ends the process ({ended})"
                return broken_allocator(self._options, judged, int(note.stem), problem)
        if not notes:
            problem = f"a worker process ended before it could run {name}"
            return SpecError("workers", f"{problem}; a script must start campaigns under if __name__ == '__main__'")
        chunks = ", ".join(note.stem for note in notes)
        problem = f"a worker process ended while {name} ran chunk {chunks}, and its inputs alone do not do it again"
        return SpecError("workers", f"{problem}; is there memory enough for {self._options.workers} workers?")


def _exit_code(allocator: str, judged: CaseInput) -> int | None:
    """Return the exit status of a process of its own that judges an input; None when it has to be stopped."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_judge_alone, args=(allocator, judged), daemon=True)
    with _interrupts_held():
        process.start()
    process.join(TRIAL_SECONDS)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def _judge_alone(allocator: str, judged: CaseInput) -> None:
    _begin()
    with contextlib.suppress(Exception):
        if isinstance(judged, Trace):
            from ..sim.cache.run import run_trace

            run_trace(judged, allocator)
        elif isinstance(judged, Pair):
            from .transfer_judging import judge_transfer

            judge_transfer(judged, allocator)
        else:
            judge(judged, resolve(allocator))
    sys.stderr.flush()
    os._exit(0)  # threads that the allocator has started would keep the process alive


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back, also in a process that starts meanwhile: it inherits that until ``_begin``."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the first process to start would start it, and let Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(notes: str | None = None) -> None:
    """Set up a worker: Ctrl-C ends the chunk, what an allocator prints is no output, and no worker outlives us.

    The folder ``notes`` does not outlive a campaign that was killed, either.
    """
    for number in _INTERRUPTS:
        signal.signal(number, _note_interrupt)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    sys.stdout = sys.stderr
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel, notes), daemon=True).start()


def interrupted() -> bool:
    """Say whether Ctrl-C or SIGTERM has reached this worker."""
    return _interrupted


def _note_interrupt(*_: object) -> None:
    global _interrupted
    _interrupted = True


def _follow(parent: int, notes: str | None) -> None:
    """End this process when the parent has ended, by whatever means, and take away what it can no longer."""
    multiprocessing.connection.wait([parent])
    if notes is not None:
        shutil.rmtree(notes, ignore_errors=True)
    os._exit(1)


def _load(allocator: str, notes: str) -> Failure | None:
    """Import the allocator, whose module may end the process too."""
    loading = Path(notes, _LOADING)
    loading.touch()
    try:
        if transfer_named(allocator)[0] is SOUND and allocator != SOUND.name:
            resolve(layout_allocator(allocator))
    except SpecError as error:
        return Failure(error.field, error.problem)
    finally:
        loading.unlink()
    return None


def _reduce(hits: RuleHits, allocator: str, notes: str) -> _Reduced | Failure:
    reduction = Reduction(hits, allocator)
    try:
        with note_inputs(notes, REDUCTION) as record:
            to_the_end = reduction.run(record, lambda: _interrupted)
    except SpecError as error:
        return Failure(error.field, error.problem)
    return _Reduced(encode_spec(reduction.spec), reduction.message, to_the_end)


def _run_chunk(options: Options, chunk: int, examples: int, notes: str) -> ChunkResult | Failure:
    try:
        with note_inputs(notes, chunk) as record:
            run = Chunk(options, chunk, record, lambda: _interrupted)
            run.run(examples)
            return run.result()
    except SpecError as error:
        return Failure(error.field, error.problem)


def _judge_cases(options: Options, notes: str) -> SavedCases | Failure:
    try:
        with note_inputs(notes, SAVED_CASES) as record:
            return judge_saved_cases(options, record)
    except SpecError as error:
        return Failure(error.field, error.problem)


@contextlib.contextmanager
def note_inputs(folder: str, chunk: int) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes down the input at hand, in a file that outlives this process but not the chunk."""
    path = Path(folder) / f"{chunk}.json"
    with path.open("wb", buffering=0) as file:

        def record(spec: bytes) -> None:
            file.seek(0)
            file.truncate()
            file.write(spec)

        yield record
    path.unlink(missing_ok=True)
