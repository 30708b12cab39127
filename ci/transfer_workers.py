"""Campaigns over pairs on worker processes, which an allocator may take down: the pair that did it is named.

What is said of workers in ``kvsan.ci.workers`` holds here too: each writes down the pair that it is about to judge, in
a chunk, in a reduction and when saved cases are judged again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from ..model.errors import SpecError
from .campaign import REDUCTION, SAVED_CASES, Options
from .ledger import SavedCases
from .transfer_campaign import PairChunk, PairFault, PairHit, PairRun, Settle, judge_saved_pairs, settle
from .workers import Failure, Workers, interrupted, note_inputs, results_of


def chunks_of_workers(
    options: Options, refusals: str, tasks: Iterator[tuple[int, int]]
) -> Iterator[PairChunk | SavedCases]:
    """Yield what became of the saved pairs, then the chunks of ``tasks`` in order."""
    return results_of(options, tasks, _judge_cases, partial(_run_chunk, refusals))


@contextlib.contextmanager
def settling_worker(options: Options) -> Iterator[Settle]:
    """Yield a function that does what ``settle`` does in a worker process."""
    with Workers(options, 1) as workers:

        def settle_there(hits: list[PairHit], options: Options, refusals: str, reduce: bool) -> tuple[PairFault, bool]:
            future = workers.submit(_settle, hits, options, refusals, reduce, str(workers.notes))
            try:
                return workers.result(future)
            except KeyboardInterrupt:
                return next(workers.interrupted([future]), None) or settle(hits, options, refusals, False)

        yield settle_there


def _run_chunk(refusals: str, options: Options, chunk: int, count: int, notes: str) -> PairChunk | Failure:
    try:
        with note_inputs(notes, chunk) as record:
            run = PairRun(options, refusals, chunk, record, interrupted)
            run.run(count)
            return run.result()
    except SpecError as error:
        return Failure(error.field, error.problem)


def _judge_cases(options: Options, notes: str) -> SavedCases | Failure:
    try:
        with note_inputs(notes, SAVED_CASES) as record:
            return judge_saved_pairs(options, record)
    except SpecError as error:
        return Failure(error.field, error.problem)


def _settle(
    hits: list[PairHit], options: Options, refusals: str, reduce: bool, notes: str
) -> tuple[PairFault, bool] | Failure:
    try:
        with note_inputs(notes, REDUCTION) as record:
            return settle(hits, options, refusals, reduce, record, interrupted)
    except SpecError as error:
        return Failure(error.field, error.problem)
