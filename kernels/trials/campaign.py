"""Trying one kernel over many shapes in one process, which may be a worker that was spawned."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ...model.errors import SpecError
from ..device import open_device
from .shape import Shape


def campaign(
    kernel: str, device_kind: str, shapes: int, first_seed: int, size: str, shrink: bool, own: str | None
) -> dict[str, Any]:
    """Try one kernel in this process: ours, or somebody's ``own``, named ``module:function``."""
    started = time.monotonic()
    device = open_device(device_kind)
    # only now, because opening the device settles whether Triton compiles or interprets
    from .kernels import run_trials, trial_named
    from .own import own_trial
    from .shrinking import shrink_shape
    from .variants import compiled_variants

    trial = trial_named(kernel) if own is None else own_trial(kernel, own)
    found = run_trials(device, trial, range(first_seed, first_seed + shapes), size, may_refuse=own is not None)
    report: dict[str, Any] = msgspec.to_builtins(found)
    report["variants"] = compiled_variants()
    report["seconds"] = round(time.monotonic() - started, 1)
    if shrink and found.failures:

        def fails(shape: Shape) -> bool:
            try:
                return not trial.run(device, shape).passed
            except (SpecError, ValueError):
                return False

        report["smallest"] = msgspec.to_builtins(shrink_shape(found.failures[0][0], fails))
    return report
