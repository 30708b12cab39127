"""The vLLM that is installed, by its era; what is told of its tensors is the same for all."""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import Any

ERAS = (((0, 30), 3, "vllm_late"), ((0, 23), 2, "vllm_early"), ((0, 11), 1, "vllm_early"))
"""From which release on, its era, and the module that calls it."""


def load() -> Any:
    """Return what answers for the version that is installed; leave with a reason where none does."""
    import logging

    logging.disable(logging.WARNING)
    from vllm import __version__ as version

    release = tuple(int(part) for part in version.split(".")[:2])
    for first, era, module in ERAS:
        if release >= first:
            return importlib.import_module(module).Planner(version, era)
    raise SystemExit(f"vllm {version} cannot be driven, needs 0.11 or newer")


def bare_seconds(planner: Any, requests: list[dict[str, Any]]) -> float:
    """Return the seconds that the engine's planner and views alone take for ``requests``: what it is told of the layers
    is made before, and nothing is told of what it made. What it raises counts as well."""
    prepared = [planner.prepared(request) for request in requests]
    total = 0.0
    for asked in prepared:
        started = time.perf_counter()
        with contextlib.suppress(Exception):
            planner.made(asked)
        total += time.perf_counter() - started
    return total


def kernel_tokens(plan: Any, request: dict[str, Any]) -> list[int]:
    """Return the tokens of the blocks that kernels see, by group: those asked for, or the planner's own; states have no
    smaller ones."""
    asked = request.get("kernel")
    return [
        int(group.kv_cache_spec.block_size) if asked is None or recurrent(group.kv_cache_spec) else asked
        for group in plan.kv_cache_groups
    ]


def recurrent(spec: Any) -> bool:
    """Whether a group's spec is one of states, or of several such."""
    return hasattr(next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values())), "shapes")
