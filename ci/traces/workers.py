"""Campaigns over traces on worker processes, which an allocator may take down: the trace that did it is named.

What is said of workers in ``kvsan.ci.workers`` holds here too: each writes down the trace that it is about to run, in a
chunk, in a reduction and when saved cases are run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ...model.errors import SpecError
from ..campaign import REDUCTION, SAVED_CASES, Options
from ..ledger import SavedCases
from ..workers import Failure, Workers, interrupted, note_inputs, results_of
from .campaign import TraceChunk, TraceFault, TraceHit, TraceRun, judge_saved_traces, settle


def chunks_of_workers(options: Options, tasks: Iterator[tuple[int, int]]) -> Iterator[TraceChunk | SavedCases]:
    """Yield what became of the saved traces, then the chunks of ``tasks`` in order."""
    return results_of(options, tasks, _judge_cases, _run_chunk)


@contextlib.contextmanager
def settling_worker(
    options: Options,
) -> Iterator[Callable[[list[TraceHit], Options, bool], tuple[TraceFault, bool]]]:
    """Yield a function that does what ``settle`` does in a worker process."""
    with Workers(options, 1) as workers:

        def settle_there(hits: list[TraceHit], options: Options, reduce: bool) -> tuple[TraceFault, bool]:
            future = workers.submit(_settle, hits, options, reduce, str(workers.notes))
            try:
                return workers.result(future)
            except KeyboardInterrupt:
                return next(workers.interrupted([future]), None) or settle(hits, options, False)

        yield settle_there


def _run_chunk(options: Options, chunk: int, count: int, notes: str) -> TraceChunk | Failure:
    try:
        with note_inputs(notes, chunk) as record:
            run = TraceRun(options, chunk, record, interrupted)
            run.run(count)
            return run.result()
    except SpecError as error:
        return Failure(error.field, error.problem)


def _judge_cases(options: Options, notes: str) -> SavedCases | Failure:
    try:
        with note_inputs(notes, SAVED_CASES) as record:
            return judge_saved_traces(options, record)
    except SpecError as error:
        return Failure(error.field, error.problem)


def _settle(hits: list[TraceHit], options: Options, reduce: bool, notes: str) -> tuple[TraceFault, bool] | Failure:
    try:
        with note_inputs(notes, REDUCTION) as record:
            return settle(hits, options, reduce, record, interrupted)
    except SpecError as error:
        return Failure(error.field, error.problem)
