"""The kernels that can be tried, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from ...model.errors import SpecError, shown
from ..device import Device
from . import attention, rows, sparse, state
from .outcome import Outcome
from .shape import LARGE, Shape, draw_shape, draw_state_shape


class Trial(msgspec.Struct, frozen=True):
    """A kernel's name, the group it belongs to, how its shapes are drawn and how one is tried."""

    name: str
    group: str
    draw: Callable[[str, int, str], Shape]
    run: Callable[[Device, Shape], Outcome]


TRIALS: Final = (
    Trial("append", "quantize", draw_shape, rows.trial_append),
    Trial("fetch", "quantize", draw_shape, rows.trial_fetch),
    Trial("quantize", "quantize", draw_shape, rows.trial_quantize),
    Trial("copy", "pages", draw_shape, rows.trial_copy),
    Trial("decode", "attention", draw_shape, attention.trial_decode),
    Trial("prefill", "attention", draw_shape, attention.trial_prefill),
    Trial("latent", "attention", draw_shape, attention.trial_latent),
    Trial("skip-softmax", "skip-softmax", draw_shape, attention.trial_skip_softmax),
    Trial("sparse", "sparse", draw_shape, sparse.trial_sparse),
    Trial("conv", "state", draw_state_shape, state.trial_conv),
    Trial("mamba2", "state", draw_state_shape, state.trial_mamba2),
    Trial("delta", "state", draw_state_shape, state.trial_delta),
)


def trial_named(name: str) -> Trial:
    """Return the trial of a kernel; raise ``SpecError`` listing the known ones."""
    for trial in TRIALS:
        if trial.name == name:
            return trial
    known = ", ".join(trial.name for trial in TRIALS)
    raise SpecError("kernel", f"unknown kernel {shown(name)}, needs one of {known}")


class Campaign(msgspec.Struct, frozen=True):
    """What came of many trials of one kernel: how many it refused, failures with their shapes, and the largest
    differences by format."""

    kernel: str
    trials: int
    refused: int
    failures: tuple[tuple[Shape, str], ...]
    relative_l2: dict[str, float]
    worst: dict[str, float]


def run_trials(
    device: Device, trial: Trial, seeds: Iterable[int], size: str = LARGE, *, may_refuse: bool = False
) -> Campaign:
    """Try every seed; a kernel that raises counts as failed.

    One that ``may_refuse`` may raise ``SpecError``, which is counted apart.
    """
    failures: list[tuple[Shape, str]] = []
    l2: dict[str, float] = {}
    worst: dict[str, float] = {}
    count = refused = 0
    for seed in seeds:
        shape = trial.draw(trial.name, seed, size)
        count += 1
        try:
            outcome = trial.run(device, shape)
        except Exception as error:  # a kernel may fail in any way
            if may_refuse and isinstance(error, SpecError):
                refused += 1
                continue
            failures.append((shape, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
            continue
        name, found = shape.format.value, outcome.difference
        l2[name] = max(l2.get(name, 0.0), found.relative_l2)
        worst[name] = max(worst.get(name, 0.0), found.worst)
        if not outcome.passed:
            failures.append((shape, outcome.text))
    return Campaign(trial.name, count, refused, tuple(failures), l2, worst)
