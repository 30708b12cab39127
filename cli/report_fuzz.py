"""The report of a campaign for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ..ci.campaign import Options, Result
from ..sim.spec_words import describe_spec
from ..sim.transfer.words import describe_pair
from .fuzz_engine import engine_of
from .trace_words import describe_trace
from .wording import printable_line, printable_path

if TYPE_CHECKING:
    from rich.console import Console

    from ..ci.traces.campaign import TraceFault, TraceResult
    from ..ci.traces.coverage import TraceCoverage
    from ..ci.transfer_campaign import PairCampaign, PairFault
    from ..ci.transfer_coverage import PairCoverage

    AnyResult: TypeAlias = Result | TraceResult | PairCampaign


def report_result(console: Console, result: AnyResult, options: Options) -> None:
    """Print what a campaign of any kind found."""
    if isinstance(result, Result):
        report_campaign(console, result, options)
        return
    from ..ci.traces.campaign import TraceResult

    if isinstance(result, TraceResult):
        report_trace_campaign(console, result, options)
    else:
        report_pair_campaign(console, result, options)


def report_campaign(console: Console, result: Result, options: Options) -> None:
    """Print what a campaign found: a line of totals, a paragraph per rule, and what was never drawn."""
    from rich.padding import Padding
    from rich.text import Text

    family = "" if options.family is None else f", family {options.family}"
    rate = result.examples / max(result.seconds, 1e-9)
    console.print(
        f"{_named(result)}: {result.examples:,} examples in {result.seconds:.1f} s ({rate:,.0f} per second), "
        f"seed {result.seed}{family}, {result.refused:,} refused, {result.known:,} known limits hit",
        markup=False,
    )
    if result.interrupted:
        console.print("interrupted: cases found so far are saved, not all of them reduced", style="yellow")
    for fault in result.faults:
        console.print()
        console.print(f"✗ {fault.rule}", style="bold red", end="")
        console.print(f" (example {fault.examples_to_find:,}, size {fault.size})", markup=False)
        console.print(Padding(Text(printable_line(fault.message)), (0, 0, 0, 2)))
        console.print("  smallest case:", markup=False)
        for line in describe_spec(fault.spec):
            console.print(f"    {line}", markup=False)
        if fault.case is not None:
            console.print(f"  saved as {printable_path(fault.case)}", markup=False, soft_wrap=True)
    coverage = result.coverage
    if coverage.cases_failing:
        failing = printable_path(", ".join(coverage.cases_failing))
        console.print(f"✗ saved cases that still fail: {failing}", style="bold red", markup=False)
    if result.nothing_checked:
        console.print(f"! nothing was checked: all {result.examples:,} specs were refused", style="bold yellow")
    elif not result.faults:
        console.print("✓ no rule is broken outside known limits", style="green")
    console.print()
    never = [f"{axis} {', '.join(values)}" for axis, values in coverage.never.items() if values]
    console.print(
        f"Coverage: {coverage.pairs_seen:,} of {coverage.pairs_total:,} pairs of values, "
        f"{sum(map(bool, coverage.classes.values()))} of {len(coverage.classes)} rare classes",
        markup=False,
    )
    if coverage.classes_never:
        console.print(f"  classes never drawn: {', '.join(coverage.classes_never)}", markup=False)
    if never:
        console.print(f"  values never drawn: {'; '.join(never)}", markup=False)
    if coverage.cases_not_run:
        console.print(f"  saved cases of other allocators, not run: {len(coverage.cases_not_run)}", markup=False)
    if coverage.cases_unreadable:
        console.print(f"  files that are no saved case, not run: {len(coverage.cases_unreadable)}", markup=False)
    _say_what_next(console, result, options)


def report_trace_campaign(console: Console, result: TraceResult, options: Options) -> None:
    """Print what a campaign of traces found: a line of totals, a paragraph per rule, and what never came about."""
    rate = result.operations / max(result.seconds, 1e-9)
    console.print(
        f"{_named(result)}: {result.examples:,} traces, {result.operations:,} operations in {result.seconds:.1f} s "
        f"({rate:,.0f} per second), seed {result.seed}, {result.refused:,} specs refused, {result.known:,} known "
        "limits hit",
        markup=False,
    )
    for fault in result.faults:
        found = f"trace {fault.examples_to_find:,}, operation {fault.operations_to_find:,}"
        _print_fault(console, fault, found, "smallest trace", describe_trace(fault.trace))
    _print_end(console, result, "specs")
    console.print()
    coverage = result.coverage
    done, refused = sum(coverage.done.values()), sum(coverage.refused.values())
    console.print(
        f"Coverage: {done:,} operations done and {refused:,} refused, {coverage.pairs_seen} of {coverage.pairs_total} "
        f"pairs of operations, {_met(coverage)} situations",
        markup=False,
    )
    if coverage.classes_never:
        console.print(f"  situations never met: {', '.join(coverage.classes_never)}", markup=False)
    if coverage.never:
        console.print(f"  operations never done: {', '.join(coverage.never)}", markup=False)
    _say_what_next(console, result, options)


def report_pair_campaign(console: Console, result: PairCampaign, options: Options) -> None:
    """Print what a campaign of pairs found: a line of totals, a paragraph per rule, and what never came about."""
    rate = result.examples / max(result.seconds, 1e-9)
    coverage = result.coverage
    verdicts = ", ".join(f"{count:,} {status}" for status, count in coverage.verdicts.items())
    console.print(
        f"{result.allocator}: {result.examples:,} pairs in {result.seconds:.1f} s ({rate:,.0f} per second), seed "
        f"{result.seed}: {verdicts or 'none'}; {result.known:,} known limits hit",
        markup=False,
    )
    for fault in result.faults:
        found = f"pair {fault.examples_to_find:,}"
        _print_fault(console, fault, found, "smallest pair", describe_pair(fault.pair))
    _print_end(console, result, "pairs")
    console.print()
    reasons = sum(coverage.reasons.values())
    console.print(
        f"Coverage: {len(coverage.reasons)} reasons of {reasons:,} refusals, {_met(coverage)} situations",
        markup=False,
    )
    if coverage.classes_never:
        console.print(f"  situations never met: {', '.join(coverage.classes_never)}", markup=False)
    _say_what_next(console, result, options)


def _named(result: AnyResult) -> str:
    """Return the allocator's name, and its engine's release where it asks one."""
    engine = engine_of(result.allocator, start=not result.interrupted)
    return result.allocator if engine is None else f"{result.allocator} ({engine})"


def _met(coverage: TraceCoverage | PairCoverage) -> str:
    """Return how many situations came about, of those that can."""
    met = sum(map(bool, coverage.classes.values()))
    return f"{met} of {met + len(coverage.classes_never)}"


def _print_fault(console: Console, fault: TraceFault | PairFault, found: str, what: str, lines: list[str]) -> None:
    """Print one rule that a campaign of traces or of pairs saw broken."""
    from rich.padding import Padding
    from rich.text import Text

    console.print()
    console.print(f"✗ {fault.rule}", style="bold red", end="")
    console.print(f" ({found}, size {fault.size})", markup=False)
    console.print(Padding(Text(printable_line(fault.message)), (0, 0, 0, 2)))
    console.print(f"  {what}:", markup=False)
    for line in lines:
        console.print(f"    {line}", markup=False)
    if fault.case is not None:
        console.print(f"  saved as {printable_path(fault.case)}", markup=False, soft_wrap=True)


def _print_end(console: Console, result: TraceResult | PairCampaign, refused: str) -> None:
    """Print how a campaign of traces or of pairs ended; ``refused`` names what can be refused as a whole."""
    if result.interrupted:
        console.print("interrupted: cases found so far are saved, not all of them reduced", style="yellow")
    if result.coverage.cases_failing:
        failing = printable_path(", ".join(result.coverage.cases_failing))
        console.print(f"✗ saved cases that still fail: {failing}", style="bold red", markup=False)
    if result.nothing_checked:
        text = f"! nothing was checked: all {result.examples:,} {refused} were refused"
        console.print(text, style="bold yellow")
    elif not result.faults:
        console.print("✓ no rule is broken outside known limits", style="green")


def _say_what_next(console: Console, result: AnyResult, options: Options) -> None:
    if result.faults and options.cases is not None:
        foreign = ":" in result.allocator and not result.allocator.startswith("fault:")
        name = f" --allocator {result.allocator}" if foreign else ""
        plugin = f" --kvsan-allocator {result.allocator}" if foreign else ""
        folder = printable_path(options.cases)
        console.print(f"\nRun one again:  kvsan check CASE{name}", markup=False, soft_wrap=True)
        console.print(
            f"All of them:    pytest --kvsan-cases {folder}{plugin}",
            markup=False,
            soft_wrap=True,
        )
