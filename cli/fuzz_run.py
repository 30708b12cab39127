"""What ``kvsan fuzz`` does once its options are known."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..ci.campaign import Options, Progress, Result, run_campaign
from ..ci.profiles import profile_named
from ..model.arithmetic import div_up
from ..model.errors import SpecError, shown
from ..sim.cache.faulty import faulty_entry
from ..sim.registry import is_foreign
from ..sim.transfer.names import is_faulty_transfer
from ..strategies.families import family_named
from .allocator_choice import import_from_here
from .fuzz_engine import engine_of
from .output import print_report, stdout_kept, terminal, write_json
from .status import CLEAN, INTERRUPTED, WRONG

if TYPE_CHECKING:
    from ..ci.traces.campaign import TraceResult
    from ..ci.transfer_campaign import PairCampaign

_OPTION_OF_FIELD: Final = {name: f"--{name}" for name in ("allocator", "cases", "family", "profile", "workers")}


def fuzz_allocator(
    allocator: str,
    given: Mapping[str, str | None],
    cases: str,
    require_coverage: bool,
    json: bool,
    *,
    traces: bool = False,
    peers: bool = False,
    refusals: str | None = None,
) -> int:
    """Run the campaign and report it; return the exit status. ``refusals`` are words, given with ``peers`` alone."""
    if traces and peers:
        raise SpecError("--peers", "found together with --traces, needs one of them")
    if traces and given["--family"] is not None:
        raise SpecError("--family", "traces are drawn on small specs of their own: leave it out")
    if refusals is not None and (not peers or not refusals):
        raise SpecError("--refusals", "needs words" if peers else "found without --peers, needs it")
    import_from_here()
    with stdout_kept():
        try:
            options = read_options(allocator, given, cases, cost=10 if traces else 4 if peers else 1)
            with _live() as show:
                result = _run_pairs(options, show, refusals or "") if peers else _run(options, show, traces)
        except SpecError as error:
            raise SpecError(_OPTION_OF_FIELD.get(error.field, error.field), error.problem) from None
    if json:
        write_json(result_document(result))
    else:
        from .report_fuzz import report_result

        console = terminal()
        report_result(console, result, options)
        print_report(console)
    if result.interrupted:
        return INTERRUPTED
    uncovered = require_coverage and bool(result.coverage.classes_never)
    wrong = result.faults or result.coverage.cases_failing or uncovered or result.nothing_checked
    return WRONG if wrong else CLEAN


def _run(options: Options, show: Callable[[Progress], None], traces: bool) -> Result | TraceResult:
    if traces:
        from ..ci.traces.campaign import run_trace_campaign

        return run_trace_campaign(options, show)
    if faulty_entry(options.allocator) is not None:
        raise SpecError("allocator", f"{options.allocator} is a fault of running caches: add --traces")
    if is_faulty_transfer(options.allocator):
        raise SpecError("allocator", f"{options.allocator} is a fault of transfers: add --peers")
    return run_campaign(options, show)


def _run_pairs(options: Options, show: Callable[[Progress], None], refusals: str) -> PairCampaign:
    from ..ci.transfer_campaign import run_pair_campaign

    return run_pair_campaign(options, show, refusals=refusals)


def read_options(allocator: str, given: Mapping[str, str | None], cases: str, *, cost: int = 1) -> Options:
    """Return the campaign that the options ask for; what is given outright goes before the profile.

    A trace or a pair counts as ``cost`` examples of a profile.
    """
    profile = profile_named("dev" if given["--profile"] is None else given["--profile"])
    examples = _whole(given, "--max-examples", 1, 10_000_000)
    seconds = _whole(given, "--time", 1, 7 * 24 * 3600)
    if examples is None and seconds is None:
        examples, seconds = profile.examples, profile.seconds
        if examples is not None:
            examples = div_up(examples, cost)
    if not cases:
        raise SpecError("--cases", "found an empty path, needs a folder")
    return Options(
        allocator=allocator,
        seed=_whole(given, "--seed", 0, 2**63 - 1) or 0,
        examples=examples,
        seconds=seconds,
        workers=_whole(given, "--workers", 1, 256) or profile.workers,
        cases=Path(cases),
        family=None if given["--family"] is None else family_named(given["--family"]).name,
        isolate=is_foreign(allocator),
    )


def _whole(given: Mapping[str, str | None], option: str, low: int, high: int) -> int | None:
    """Return an option's whole number, None when it is not given; raise ``SpecError`` naming the option."""
    text = given[option]
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20 and low <= int(digits) <= high):
        raise SpecError(option, f"found {shown(text)}, needs a whole number from {low} to {high}")
    return int(digits)


def result_document(result: Result | TraceResult | PairCampaign) -> dict[str, object]:
    """Return the JSON document of a campaign; ``operations`` are counted where it was one of traces.

    ``engine`` is the name and version of the installed engine that the allocator asks, if it asks one.
    """
    count = getattr(result, "operations", None)
    operations = {} if count is None else {"operations": count}
    engine = engine_of(result.allocator, start=not result.interrupted)
    return {
        "allocator": result.allocator,
        **({} if engine is None else {"engine": engine}),
        "seed": result.seed,
        "examples": result.examples,
        **operations,
        "seconds": round(result.seconds, 3),
        "refused": result.refused,
        "known": result.known,
        "faults": [
            {
                "rule": fault.rule,
                "message": fault.message,
                "case": fault.case,
                "examples_to_find": fault.examples_to_find,
                "size": fault.size,
            }
            for fault in result.faults
        ],
        "coverage": result.coverage,
        "interrupted": result.interrupted,
    }


@contextlib.contextmanager
def _live() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows where a campaign stands: live on a terminal, else not at all."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda state: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield lambda state: live.update(_line(state), refresh=True)


def _line(state: Progress) -> str:
    rules = ", ".join(state.rules) or "none"
    return (
        f"{state.examples:,} examples, {state.per_second:,.0f} per second; rules broken: {rules}; "
        f"rare classes {state.classes_covered} of {state.classes}"
    )
