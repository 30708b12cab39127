"""The SGLang that is installed: its own pools on torch's ``meta`` device, so that no byte is allocated.

Three things are stepped around, none of which the pools need: the package's front end (``sglang/__init__.py``) is not
run, fake kernels are not registered for torchvision, whose native library does not load beside a CPU torch, and torch
is given a module of the device ``meta``, which pools look for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import time
import types
from typing import Any

from described import described

MODULE = "sglang_pools"

View = tuple[str, int, int, tuple[str, ...], Any]
"""A view as it is described: layer, part, group, axes, tensor."""


def load() -> Any:
    """Return what answers for the version that is installed."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    without_front_end()
    without_fake_kernels("torchvision")
    with_device_module("meta")
    return Pools(importlib.import_module(MODULE), importlib.metadata.version("sglang"))


def without_front_end() -> None:
    """Have ``import sglang.srt...`` find the package without running its ``__init__``."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("sglang is not installed here")
    package = types.ModuleType("sglang")
    package.__path__ = list(found.submodule_search_locations)
    package.__spec__ = found
    sys.modules["sglang"] = package


def without_fake_kernels(namespace: str) -> None:
    """Have torch ignore fake kernels of operators whose library is not there."""
    import torch

    register = torch.library.register_fake

    def registered(op: Any, *given: Any, **named: Any) -> Any:
        if isinstance(op, str) and op.startswith(f"{namespace}::"):
            return lambda function: function
        return register(op, *given, **named)

    torch.library.register_fake = registered


def with_device_module(name: str) -> None:
    """Have ``torch.get_device_module`` find an empty module for a device that has none."""
    import torch

    if not hasattr(torch, name):
        setattr(torch, name, types.ModuleType(f"torch.{name}"))


class Pools:
    """Builds what a request asks for, tells where its tensors lie, and lets go of it."""

    def __init__(self, pools: Any, version: str) -> None:
        self._pools = pools
        self._cache: Any = None
        self.greeting = {"engine": "SGLang", "version": version}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the pools of a request, or the slots that its allocator hands out, or the seconds of ``bare`` ones.

        With ``cache``, do an operation of a trace over allocators and prefix cache.
        """
        if "cache" in request:
            return dict(self._caches().answer(request))
        if "alloc" in request:
            return dict(self._pools.handed_out(request["alloc"]))
        if "bare" in request:
            return {"bare": self.bare_seconds(request["bare"])}
        made = list(self._pools.made(request))
        groups: list[list[str]] = [[] for _ in made]
        views: list[View] = []
        reported: dict[str, int] = {}
        for number, group in enumerate(made):
            reported.update(group.reported)
            for name, part, axes, tensor in group.views():
                if name not in groups[number]:
                    groups[number].append(name)
                views.append((name, part, number, axes, tensor))
        names = [group.name for group in made]
        said = {"blocks": request["pages"] + 1, "groups": groups, "names": names, "reported": reported}
        return {**said, **described(views)}

    def _caches(self) -> Any:
        """Return what drives the engine's allocators and prefix cache, imported when it is first asked for."""
        if self._cache is None:
            self._cache = importlib.import_module("sglang_cache").Caches()
        return self._cache

    def bare_seconds(self, requests: list[dict[str, Any]]) -> float:
        """Return the seconds that the pools of ``requests`` alone take, with nothing told of them."""
        started = time.perf_counter()
        for request in requests:
            with contextlib.suppress(Exception):
                list(self._pools.made(request))
        return time.perf_counter() - started
