"""``kvsan bench``: speed as ratios within one run."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json


def bench(
    what: Annotated[
        str,
        typer.Argument(
            metavar="check|fuzz|traces|engines|replay|transfer", help="What to measure.", show_default=False
        ),
    ],
    config: Annotated[
        str | None, typer.Option("--config", metavar="CONFIG", help="check: the reference case's config.json.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="N", help="fuzz: seeds for each fault.")] = "20",
    fault: Annotated[
        str | None, typer.Option("--fault", metavar="NAME", help="fuzz: measure this one fault only.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda", help="replay, transfer: where to measure.")
    ] = "cuda",
    memory: Annotated[
        str,
        typer.Option(
            "--memory", metavar="BYTES", help="replay: the pool that the passes go over; transfer: all pools."
        ),
    ] = "64GiB",
    layouts: Annotated[str, typer.Option("--layouts", metavar="N", help="replay: small layouts to replay.")] = "6000",
    json: Json = False,
) -> int:
    """Measure what a check or an operation of a trace costs, how soon faults are found, or how fast memory is moved."""
    if what == "replay":
        from .bench_replay import bench_replay

        return bench_replay(config, device, memory, layouts, json)
    if what == "transfer":
        from .bench_replay import bench_transfer

        return bench_transfer(config, device, memory, json)
    from .bench_run import run_bench

    return run_bench(what, config, seeds, fault, json)
