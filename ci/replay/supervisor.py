"""``Supervisor``: cases over child processes, results in the order of the cases.

A batch whose child dies, hangs or answers with garbage is run again case by case, and a case on which that happens
again is ``crashed``; all others are replayed as if nothing had happened. What was answered before a death stands.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TextIO, TypeAlias

import msgspec

from ...model.errors import SpecError
from ...sim.finding import Finding
from .messages import Answer, Batch, Done, Job, LayoutJob, Outcome, Ready, Reply, Start, TraceJob, Unusable
from .process import COMMAND, Child

BATCH_CASES: Final = {"cpu": 8, "cuda": 256}
"""Cases of one batch at most: a GPU gains from shared launches, the interpreter does not."""
BATCH_BYTES: Final = 16 << 20
"""Bytes of the jobs of one batch, about; a larger job goes by itself."""
ACCESS_BYTES: Final = 256
"""Bytes of a buffer or an access of a layout, or of an operation of a trace, in a message, about."""
START_SECONDS: Final = 300
"""How long a child may take to open its device."""
CASE_SECONDS: Final = 600
"""How long a child may work without an answer, unless told otherwise."""
LEAD_BATCHES: Final = 4
"""Batches that may be begun for each worker beyond a first one that is not finished."""
FAILED_STARTS: Final = 3
"""Children in a row that may fail to open a device that one has opened before."""
FINISH_SECONDS: Final = 30
"""How long a child under a wrapper may take to end and to say what was found."""

Item: TypeAlias = Job | Outcome
"""A case to replay, or what came of one already."""


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to replay.

    ``max_bytes`` is the device memory in bytes that one case may take, ``batch_cases`` None for what suits the device,
    ``static`` whether the static rules are asked too, ``kernels`` which reference kernels run (None: none),
    ``wrapper`` a command that runs the children (compute-sanitizer).
    """

    device: str
    workers: int = 1
    max_bytes: int
    static: bool = True
    kernels: str | None = None
    batch_cases: int | None = None
    case_seconds: float = CASE_SECONDS
    wrapper: tuple[str, ...] = ()


class _Trouble(msgspec.Struct):
    """A batch that was lost, the cases of it that are still to be tried alone, and whether one was to blame."""

    reason: str
    left: int
    explained: bool = False


class _Work(msgspec.Struct):
    """Jobs that go to a child together, by their number among all cases; those of a lost batch go alone."""

    jobs: dict[int, Job]
    answered: set[int]
    trouble: _Trouble | None = None


class _Worker:
    """A child and what it replays; ``work`` None: it waits for some."""

    def __init__(self, child: Child, work: _Work) -> None:
        self.child = child
        self.ready = False
        self.work: _Work | None = work
        self.deadline = time.monotonic() + START_SECONDS


class _Intake:
    """The cases as they are asked for, numbered from 0."""

    def __init__(self, items: Iterable[Item], finished: dict[int, Outcome]) -> None:
        self._items = iter(items)
        self._finished = finished
        self.taken = 0
        self.more = True

    def take(self, batch_cases: int, room: int) -> _Work | None:
        """Return the next jobs, at most ``batch_cases``, of at most ``room`` cases; None where those hold no job."""
        jobs: dict[int, Job] = {}
        size_bytes = 0
        while self.more and len(jobs) < batch_cases and room > 0 and size_bytes < BATCH_BYTES:
            item = next(self._items, None)
            if item is None:
                self.more = False
            else:
                if isinstance(item, Outcome):
                    self._finished[self.taken] = item
                else:
                    jobs[self.taken] = item
                    size_bytes += _job_bytes(item)
                self.taken += 1
                room -= 1
        return _Work(jobs, set()) if jobs else None


class Supervisor:
    """Runs cases on children; ``device_name`` and ``versions`` are known once the first child is ready.

    ``notes`` say what went wrong without a case to blame for it.
    """

    def __init__(
        self, options: ReplayOptions, *, command: Sequence[str] | None = None, stderr: TextIO | None = None
    ) -> None:
        """Start nothing yet. ``command`` runs a child (None: ``COMMAND``), ``stderr`` gets what a wrapper says."""
        self.options = options
        self.device_name: str | None = None
        self.versions: dict[str, str] = {}
        self.notes: list[str] = []
        self._command = (*options.wrapper, *(COMMAND if command is None else command))
        self._stderr = stderr if options.wrapper else None
        self._workers: list[_Worker] = []
        self._again: deque[_Work] = deque()
        self._finished: dict[int, Outcome] = {}
        self._failed_starts = 0

    def run(self, items: Iterable[Item]) -> Iterator[tuple[int, Outcome]]:
        """Yield the number of each of ``items`` and what came of it, in their order; they are asked for as needed.

        Raises ``SpecError`` where the device cannot be opened (any more). On Ctrl-C everything finished is yielded
        before ``KeyboardInterrupt`` is raised. No child is left behind, however this ends.
        """
        intake, given = _Intake(items, self._finished), 0
        try:
            while True:
                while (outcome := self._finished.pop(given, None)) is not None:
                    yield given, outcome
                    given += 1
                if not intake.more and given == intake.taken:
                    break
                self._hand_out(intake, given)
                if any(worker.work is not None for worker in self._workers):
                    self._wait()
            self._end_well()
        except KeyboardInterrupt:
            self.close()
            yield from sorted(self._finished.items())
            raise
        finally:
            self.close()

    def close(self) -> None:
        """End all children."""
        while self._workers:
            self._workers.pop().child.end()

    def _hand_out(self, intake: _Intake, given: int) -> None:
        """Give work to children that wait, and start children as long as there is work for them."""
        batch_cases = self.options.batch_cases or BATCH_CASES.get(self.options.device, 1)
        lead = (LEAD_BATCHES * self.options.workers + 1) * batch_cases
        while True:
            worker = next((worker for worker in self._workers if worker.work is None), None)
            if worker is None and len(self._workers) >= self.options.workers:
                return
            work = self._again.popleft() if self._again else intake.take(batch_cases, lead - (intake.taken - given))
            if work is None:
                return
            if worker is None:
                worker = _Worker(Child(self._command, stderr=self._stderr), work)
                self._workers.append(worker)
                options = self.options
                worker.child.say(Start(options.device, options.max_bytes, options.static, options.kernels))
            else:
                worker.work = work
                self._give_time(worker)
            worker.child.say(Batch(tuple(work.jobs.values())))

    def _give_time(self, worker: _Worker) -> None:
        worker.deadline = time.monotonic() + self.options.case_seconds

    def _wait(self) -> None:
        """Wait until a child says something or has had its time, and act on it."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.child.replies, selectors.EVENT_READ, worker)
                if worker.child.errors >= 0:
                    selector.register(worker.child.errors, selectors.EVENT_READ, worker)
                if worker.child.unsent:
                    selector.register(worker.child.requests, selectors.EVENT_WRITE, worker)
            deadlines = [worker.deadline for worker in self._workers if worker.work is not None]
            events = selector.select(max(0, min(deadlines) - time.monotonic()))
        for key, _ in events:
            worker = key.data
            if worker not in self._workers:
                continue
            if key.fd == worker.child.requests:
                worker.child.write()
            elif key.fd == worker.child.errors:
                worker.child.read_errors()
            else:
                self._listen(worker)
        for worker in list(self._workers):
            if worker.work is not None and time.monotonic() > worker.deadline:
                seconds = self.options.case_seconds if worker.ready else START_SECONDS
                self._lose(worker, f"no answer within {seconds:g} s")

    def _listen(self, worker: _Worker) -> None:
        replies = worker.child.read()
        if replies is None:
            self._lose(worker, worker.child.obituary())
            return
        try:
            for reply in replies:
                self._act(worker, reply)
        except ValueError as error:
            if isinstance(error, SpecError):
                raise
            self._lose(worker, f"it sent what is no answer: {error}")

    def _act(self, worker: _Worker, reply: Reply) -> None:
        """Act on one reply; raise ``ValueError`` for one that makes no sense here."""
        work = worker.work
        if isinstance(reply, Ready):
            worker.ready, self._failed_starts = True, 0
            self.device_name, self.versions = reply.device_name, reply.versions
            self._give_time(worker)
        elif isinstance(reply, Unusable):
            raise SpecError(reply.field, reply.problem)
        elif work is None:
            raise ValueError(f"{type(reply).__name__} without a batch")
        elif isinstance(reply, Answer):
            numbers = list(work.jobs)
            if not 0 <= reply.number < len(numbers) or numbers[reply.number] in work.answered:
                raise ValueError(f"an answer to case {reply.number} of a batch of {len(numbers)}")
            self._settle(work, numbers[reply.number], reply.outcome)
            self._give_time(worker)
        elif isinstance(reply, Done):
            if len(work.answered) < len(work.jobs):
                raise ValueError("a batch that is done and not answered")
            worker.work = None
        elif reply.alive:
            worker.work = None
            self._retry(work, reply.problem)
        else:
            self._lose(worker, reply.problem)

    def _settle(self, work: _Work, number: int, outcome: Outcome) -> None:
        """Note what came of a case; where a whole batch was lost and no case of it did it, say so."""
        self._finished[number] = outcome
        work.answered.add(number)
        trouble = work.trouble
        if trouble is not None:
            trouble.left -= 1
            trouble.explained |= outcome.status == "crashed"
            if trouble.left == 0 and not trouble.explained:
                self.notes.append(f"a batch was lost ({trouble.reason}), and no case of it does that alone")

    def _lose(self, worker: _Worker, reason: str) -> None:
        """End a child that is of no more use, and have its cases tried again."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        worker.child.end()
        work, worker.work = worker.work, None
        if not worker.ready:
            self._failed_starts += 1
            if self.device_name is None or self._failed_starts > FAILED_STARTS:
                raise SpecError("device", f"{self.options.device} cannot be opened in a child process: {reason}")
            if work is not None:
                self._again.appendleft(work)
        elif work is None:
            self.notes.append(f"a child process was lost between batches: {reason}")
        else:
            self._retry(work, reason)

    def _retry(self, work: _Work, reason: str) -> None:
        """Blame the one case that was tried alone, or try each case of a batch alone that has no answer yet."""
        left = {number: job for number, job in work.jobs.items() if number not in work.answered}
        if len(work.jobs) == 1 and left:
            self._settle(work, next(iter(left)), _crashed(reason))
        elif not left:
            self.notes.append(f"a child process was lost after it had answered its batch: {reason}")
        else:
            trouble = _Trouble(reason, len(left))
            again = [_Work({number: job}, set(), trouble) for number, job in left.items()]
            self._again.extendleft(reversed(again))

    def _end_well(self) -> None:
        """Let children under a wrapper end by themselves, and note what it says."""
        for worker in self._workers if self.options.wrapper else ():
            status = worker.child.finish(FINISH_SECONDS)
            if status != 0:
                what = "did not end" if status is None else f"ended with status {status}"
                self.notes.append(f"{self.options.wrapper[0]} {what}: it has found errors, see its report above")


def _job_bytes(job: Job) -> int:
    if isinstance(job, LayoutJob):
        return ACCESS_BYTES * (len(job.layout.buffers) + len(job.layout.accesses))
    if isinstance(job, TraceJob):
        return ACCESS_BYTES * (len(job.trace.operations) + len(job.trace.spec.layers))
    return len(job.spec)


def _crashed(reason: str) -> Outcome:
    finding = Finding(
        rule="replay-mismatch",
        message=f"the device crashed on this case, replayed alone: {reason}",
        remedy="report this case: a layout is replayed, or refused in one line, and never ends the replay",
    )
    return Outcome(status="crashed", findings=(finding,), message=finding.message)
