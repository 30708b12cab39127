"""Tries kernels over fuzzed shapes: ``python -m kvsan.kernels.trials --device cuda --shapes 500 --workers 6``.

Prints one JSON document: for each kernel the trials, the largest differences by format, and the failures with their
shapes, shrunk with ``--shrink``. On a GPU it says how many variants of each Triton
function this process compiled. Exit status 0 where all were within their bounds, 1 where not or a function has more
than 40 variants, 2 for bad input.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys

import msgspec

from ...model.errors import SpecError
from ..device import open_device
from .campaign import campaign
from .shape import LARGE, SMALL

MAX_VARIANTS = 40


def main(arguments: list[str] | None = None) -> int:
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m kvsan.kernels.trials", description="Try reference kernels.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernel", action="append", help="a kernel's name; several may be given (default: all)")
    parser.add_argument("--shapes", type=int, default=20, help="shapes for each kernel")
    parser.add_argument("--seed", type=int, default=0, help="the first shape's number")
    parser.add_argument("--size", choices=(SMALL, LARGE), help="default: small on the cpu, else large")
    parser.add_argument("--workers", type=int, default=1, help="kernels tried at the same time")
    parser.add_argument("--own", metavar="MODULE:FUNCTION", help="your kernel, in place of ours (decode or prefill)")
    parser.add_argument("--shrink", action="store_true", help="shrink the first failure of each kernel")
    options = parser.parse_args(arguments)
    size = options.size or (SMALL if options.device == "cpu" else LARGE)
    try:
        open_device(options.device)
        from .kernels import TRIALS, trial_named
        from .own import own_trial

        names = [trial_named(name).name for name in options.kernel or [trial.name for trial in TRIALS]]
        if options.own is not None:
            names = options.kernel or ["decode"]
            for name in names:
                own_trial(name, options.own)
    except SpecError as error:
        print(f"kvsan trials: {error}", file=sys.stderr)
        return 2
    rest = (options.device, options.shapes, options.seed, size, options.shrink, options.own)
    jobs = [(name, *rest) for name in names]
    if options.workers > 1 and len(jobs) > 1:
        # a process that has used CUDA must not fork
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
            reports = list(pool.map(campaign, *zip(*jobs, strict=True)))
    else:
        reports = [campaign(*job) for job in jobs]
    print(msgspec.json.format(msgspec.json.encode({"device": options.device, "kernels": reports})).decode())
    crowded = any(count > MAX_VARIANTS for report in reports for count in report["variants"].values())
    return 1 if crowded or any(report["failures"] for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
