"""What ``kvsan replay`` does once its options are known."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..ci.replay.messages import Outcome
from ..ci.replay.supervisor import BATCH_CASES, Item, ReplayOptions, Supervisor
from ..kernels.results.choice import KERNELS
from ..model.arithmetic import div_up
from ..model.errors import SpecError, require_choice, require_int
from .deployment import Given, read_size, read_whole
from .output import PATIENCE_SECONDS, print_report, stdout_kept, terminal, write_json
from .replay_input import Prepared, Source, prepare, sources_of
from .status import BAD_INPUT, CLEAN, INTERRUPTED, WRONG

MAX_WORKERS: Final = 256
DEFAULT_MAX_BYTES: Final = 256 << 20
"""Memory in bytes of one case, unless told otherwise; the same on every device, so that verdicts and digests are."""
QUIET_SECONDS: Final = 30
"""How long a run without a terminal goes on between two lines about its progress."""
SANITIZER: Final = "compute-sanitizer"

STATUSES: Final = ("clean", "findings", "rejected", "refused", "crashed", "bad-input")


class Entry(msgspec.Struct, frozen=True):
    """One case, the allocator that it ran with, and what came of it."""

    case: str
    allocator: str | None
    outcome: Outcome


class ReplayRun(msgspec.Struct, kw_only=True):
    """A whole run; ``failure`` is the one line that says why it stopped before its end."""

    device: str
    device_name: str | None = None
    versions: dict[str, str] = {}
    total: int
    entries: list[Entry] = []
    notes: list[str] = []
    seconds: float = 0.0
    interrupted: bool = False
    failure: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many cases there are of each status."""
        counts = dict.fromkeys(STATUSES, 0)
        for entry in self.entries:
            counts[entry.outcome.status] += 1
        return counts

    @property
    def status(self) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        counts = self.counts
        if self.failure is not None:
            return BAD_INPUT
        if self.notes or any(counts[status] for status in ("findings", "rejected", "refused", "crashed")):
            return WRONG
        return BAD_INPUT if counts["bad-input"] else CLEAN


def replay_cases(
    paths: Sequence[str],
    given_options: Mapping[str, str | None],
    given: Given,
    allocator: str | None,
    *,
    static: bool,
    sanitizer: bool,
    json: bool,
) -> int:
    """Replay the cases at ``paths`` and report them; return the exit status."""
    with stdout_kept():  # an allocator of somebody's own may print
        sources = sources_of(paths)
        options = read_options(given_options, len(sources), static=static, sanitizer=sanitizer)
        prepared = prepare(sources, given, allocator)
        run = run_replay(options, sources, prepared)
    if json:
        write_json(document_of(run))
    else:
        from .report_replay import report_replay

        console = terminal()
        report_replay(console, run)
        print_report(console)
    if run.failure is not None:
        raise SpecError("", run.failure)
    return run.status


def read_options(given: Mapping[str, str | None], cases: int, *, static: bool, sanitizer: bool) -> ReplayOptions:
    """Return how to replay ``cases`` cases; raise ``SpecError`` naming the option that is wrong."""
    device = given["--device"] or ""
    require_choice("--device", device, ("cpu", "cuda"))
    workers = require_int("--workers", read_whole("--workers", given["--workers"] or ""), 1, MAX_WORKERS)
    memory = given["--max-memory"]
    max_bytes = DEFAULT_MAX_BYTES if memory is None else read_size("--max-memory", memory)
    kernels = given["--kernels"]
    if kernels is not None:
        require_choice("--kernels", kernels, ("all", *KERNELS))
    seconds = require_int("--timeout", read_whole("--timeout", given["--timeout"] or ""), 1, 7 * 24 * 3600)
    return ReplayOptions(
        device=device,
        workers=workers,
        max_bytes=require_int("--max-memory", max_bytes, 1, 1 << 50),
        static=static,
        kernels=kernels,
        batch_cases=max(1, min(BATCH_CASES[device], div_up(cases, workers))),
        case_seconds=seconds,
        wrapper=_sanitizer(device) if sanitizer else (),
    )


def _sanitizer(device: str) -> tuple[str, ...]:
    """Return the command that runs a child under compute-sanitizer; raise ``SpecError`` where there is none."""
    if device != "cuda":
        raise SpecError("--sanitizer", f"found --device {device}, needs --device cuda: it watches CUDA kernels")
    if shutil.which(SANITIZER) is None:
        raise SpecError("--sanitizer", f"{SANITIZER} is not on the path; it comes with NVIDIA's CUDA toolkit")
    return (SANITIZER, "--tool", "memcheck", "--error-exitcode", "86")


def run_replay(options: ReplayOptions, sources: Sequence[Source], prepared: Iterator[Prepared]) -> ReplayRun:
    """Replay ``prepared`` under supervision; Ctrl-C and a lost device end it with what there is.

    Raises ``SpecError`` where the device cannot be opened at all.
    """
    run = ReplayRun(device=options.device, total=len(sources))
    supervisor = Supervisor(options, stderr=sys.stderr)
    allocators: dict[int, str | None] = {}
    started = time.monotonic()

    def items() -> Iterator[Item]:
        for number, ready in enumerate(prepared):
            allocators[number] = ready.allocator
            yield ready.item

    try:
        with _live(run.total) as show:
            for number, outcome in supervisor.run(items()):
                run.entries.append(Entry(sources[number].path, allocators.pop(number), outcome))
                show(run)
    except KeyboardInterrupt:
        run.interrupted = True
    except SpecError as error:
        if supervisor.device_name is None:
            raise SpecError(f"--{error.field}" if error.field == "device" else error.field, error.problem) from None
        run.failure = str(error)
    finally:
        supervisor.close()
    run.seconds = time.monotonic() - started
    run.device_name, run.versions, run.notes = supervisor.device_name, supervisor.versions, supervisor.notes
    return run


def document_of(run: ReplayRun) -> dict[str, Any]:
    """Return the JSON document of a run."""
    return {
        "device": run.device,
        "device_name": run.device_name,
        "versions": run.versions,
        "cases": [_case(entry) for entry in run.entries],
        "summary": {
            "cases": run.total,
            **{status.replace("-", "_"): count for status, count in run.counts.items()},
            "bytes": sum([entry.outcome.size_bytes for entry in run.entries]),
        },
        "notes": run.notes,
        "seconds": round(run.seconds, 3),
        "interrupted": run.interrupted,
    }


def _case(entry: Entry) -> dict[str, Any]:
    outcome = entry.outcome
    return {
        "case": entry.case,
        "allocator": entry.allocator,
        "status": outcome.status,
        "digest": outcome.digest,
        "findings": [
            {"rule": found.rule, "message": found.message, "remedy": found.remedy, "where": found.where}
            for found in outcome.findings
        ],
        "rejection": outcome.rejection,
        "message": outcome.message,
        "bytes": outcome.size_bytes,
        "compared_on_host": outcome.compared_on_host,
        "notes": outcome.notes,
    }


@contextlib.contextmanager
def _live(total: int) -> Iterator[Callable[[ReplayRun], None]]:
    """Yield a function that shows how far a long run is: a bar on a terminal, else a line now and then."""
    started = time.monotonic()
    if sys.stderr is None or not sys.stderr.isatty():
        last = started

        def tell(run: ReplayRun) -> None:
            nonlocal last
            if time.monotonic() - last > QUIET_SECONDS:
                last = time.monotonic()
                print(f"kvsan: {progress_words(run)}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("cases", visible=False, total=total)

        def show(run: ReplayRun) -> None:
            late = time.monotonic() - started > PATIENCE_SECONDS
            progress.update(task, completed=len(run.entries), visible=late)

        yield show


def progress_words(run: ReplayRun) -> str:
    """Return how far a run is, in a line."""
    others = [f"{count:,} {status}" for status, count in run.counts.items() if count]
    return f"{len(run.entries):,} of {run.total:,} cases replayed: {', '.join(others)}"
