"""``kvsan bench``: speed as ratios within one run."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json


def bench(
    what: Annotated[str, typer.Argument(metavar="check|fuzz|traces", help="What to measure.", show_default=False)],
    config: Annotated[
        str | None, typer.Option("--config", metavar="CONFIG", help="check: the reference case's config.json.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="N", help="fuzz: seeds for each fault.")] = "20",
    fault: Annotated[
        str | None, typer.Option("--fault", metavar="NAME", help="fuzz: measure this one fault only.")
    ] = None,
    json: Json = False,
) -> int:
    """Measure what a check or an operation of a trace costs, or how quickly the fuzzer finds the shipped faults."""
    from .bench_run import run_bench

    return run_bench(what, config, seeds, fault, json)
