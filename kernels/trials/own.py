"""Somebody's own kernel in place of ours, against the same references over the same fuzzed layouts.

A kernel is a Python function ``kernel(problem, queries, out)`` that launches whatever it likes (Triton, CuPy, a C++
extension) and writes attention to ``out``; see ``docs/your-kernel.md``.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from ...model.errors import SpecError, require_choice, shown
from ..device import Device
from .attention import AttentionKernel, trial_decode, trial_prefill
from .kernels import Trial
from .outcome import Outcome
from .shape import Shape, draw_shape

_KINDS: Final[dict[str, Callable[[Device, Shape, AttentionKernel], Outcome]]] = {
    "decode": trial_decode,
    "prefill": trial_prefill,
}


def own_trial(kind: str, kernel: str | AttentionKernel) -> Trial:
    """Return the trial of a kernel: a function, or ``module:function``, which imports the module.

    Modules are looked for in the current folder first. Pass only names that the user gave. Raises ``SpecError`` for
    what cannot be loaded or called.
    """
    require_choice("kernel", kind, tuple(_KINDS))
    function = _load(kernel) if isinstance(kernel, str) else kernel
    if not callable(function):
        raise SpecError("--own", f"found {shown(kernel)}, needs a function of (problem, queries, out)")
    return Trial(kind, "own", draw_shape, functools.partial(_run, _KINDS[kind], function))


def _run(trial: Callable[[Device, Shape, AttentionKernel], Outcome], kernel: AttentionKernel, device: Device,
         shape: Shape) -> Outcome:  # fmt: skip
    return trial(device, shape, kernel)


def _load(target: str) -> Any:
    module_name, colon, function_name = target.partition(":")
    if not colon:
        raise SpecError("--own", f"found {shown(target)}, needs module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # somebody's module may fail in any way while it loads
        raise SpecError("--own", f"cannot import {shown(module_name)}: {type(error).__name__}: {error}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SpecError("--own", f"module {module_name} has no function {shown(function_name)}")
    return function
