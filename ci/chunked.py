"""What campaigns over traces and over pairs have in common: chunks in order, saved cases, the reduced case on disk."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from ..model.errors import SpecError
from ..model.spec import CacheSpec
from ..sim.cache.trace import Trace
from ..sim.transfer.pair import Pair
from .campaign import Options
from .cases import Case, add_case, case_files, load_case, withdraw_case
from .ledger import SavedCases

Chunk = TypeVar("Chunk")
Input = TypeVar("Input", CacheSpec, Trace, Pair)


def chunk_tasks(options: Options, started: float, size: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, examples) of chunks of ``size`` while there is budget; ``started`` is a monotonic time."""
    left, chunk = options.examples, 0
    while left is None or left > 0:
        if options.seconds is not None and time.monotonic() - started >= options.seconds:
            return
        count = size if left is None else min(size, left)
        yield chunk, count
        chunk += 1
        left = None if left is None else left - count


def chunks_in_order(
    run: Callable[[int, int], Chunk], tasks: Iterator[tuple[int, int]], workers: int
) -> Iterator[Chunk]:
    """Yield ``run(chunk, examples)`` for all tasks in order, run here or, pickled, by worker processes.

    Raises ``SpecError`` where a worker process dies: what it was at work on cannot be told from what others were.
    """
    if workers == 1:
        for chunk, examples in tasks:
            yield run(chunk, examples)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting: list[tuple[int, concurrent.futures.Future[Chunk]]] = []
        try:
            while True:
                while len(waiting) <= workers and (task := next(tasks, None)) is not None:
                    waiting.append((task[0], pool.submit(run, *task)))
                if not waiting:
                    return
                yield waiting.pop(0)[1].result()
        except BrokenProcessPool:
            at_work = f"chunks {waiting[0][0]} to {waiting[-1][0]}" if waiting else "the next chunk"
            found = f"a worker process died at work on {at_work}, killed or out of memory"
            raise SpecError("workers", f"{found}: cases found before are saved; run again with --workers 1") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def saved_cases_of(options: Options, kind: type[Input], rules_of: Callable[[Input, str], Iterable[str]]) -> SavedCases:
    """Run the saved cases of the campaign's folder again, those of its allocator with an input of this ``kind``.

    ``rules_of`` gives the rules that an input breaks now with an allocator; a case fails while it breaks a rule that
    it was saved for, or, naming none, any.
    """
    run, failing, not_run = [], [], []
    for path in case_files([options.cases] if options.cases is not None and options.cases.is_dir() else []):
        try:
            case = load_case(path)
        except SpecError:
            case = None
        if case is None or case.allocator != options.allocator or not isinstance(case.input, kind):
            not_run.append(path.name)
            continue
        run.append(path.name)
        saved = {entry.rule for entry in case.found}
        rules = set(rules_of(case.input, case.allocator))
        if saved & rules if saved else rules:
            failing.append(path.name)
    return SavedCases(tuple(run), tuple(failing), tuple(not_run))


def save_reduced(case: Case, rule: str, before: Iterable[str | None], folder: Path) -> str:
    """Save the reduced case of ``rule`` in place of those saved on the way (file names ``before``); return its path."""
    path = add_case(case, folder)
    for name in before:
        if name is not None and name != path.name:
            withdraw_case(folder / name, rule)
    return str(path)
