"""``kvsan fuzz``: draw specs (or traces, or pairs) until an allocator breaks a rule, and save the smallest case."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json

_BUDGET = "Budget"


def fuzz(
    allocator: Annotated[
        str,
        typer.Option("--allocator", metavar="NAME", help="A name from `kvsan allocators`, or module:function."),
    ],
    traces: Annotated[
        bool, typer.Option("--traces", help="Drive a running cache over small layouts, in place of drawing specs.")
    ] = False,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Move a cache between two deployments of one model; NAME may be transfer."),
    ] = False,
    refusals: Annotated[
        str | None,
        typer.Option("--refusals", metavar="WORDS", help="--peers: a refused pair is a fault if the reason says this."),
    ] = None,
    max_examples: Annotated[
        str | None,
        typer.Option("--max-examples", metavar="N", help="Specs, traces or pairs at most.", rich_help_panel=_BUDGET),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="SECONDS", help="Start no new chunk after this.", rich_help_panel=_BUDGET),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME",
            help="dev (2,000 examples, the default), ci (60 s) or nightly (100,000).",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    workers: Annotated[
        str | None, typer.Option("--workers", metavar="N", help="Worker processes.", rich_help_panel=_BUDGET)
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            metavar="NAME",
            help="Specs to draw: dense, dense-v1, qsa or any; else what the allocator is known to support.",
        ),
    ] = None,
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Same seed, same examples.")] = "0",
    cases: Annotated[
        str, typer.Option("--cases", metavar="DIR", help="Where cases are saved; made when there is one.")
    ] = "kvsan-cases",
    require_coverage: Annotated[
        bool, typer.Option("--require-coverage", help="Fail when a rare class of layouts was never drawn.")
    ] = False,
    json: Json = False,
) -> int:
    """Draw specs, lay each out, and report every rule that the allocator breaks, each with its smallest case."""
    from .fuzz_run import fuzz_allocator

    given = {
        "--max-examples": max_examples,
        "--time": time,
        "--profile": profile,
        "--workers": workers,
        "--seed": seed,
        "--family": family,
    }
    return fuzz_allocator(
        allocator, given, cases, require_coverage, json, traces=traces, peers=peers, refusals=refusals
    )
