"""One order of simplicity on traces: fewer operations first, then the simpler spec, then smaller arguments.

The order is total, so that "the smallest trace" is always a single one.
"""

from __future__ import annotations

import functools
from typing import Final, TypeAlias

from ...model.spec import CacheSpec
from ...sim.cache.trace import KINDS, Operation, Trace
from ..simplicity import simplicity_key

TraceKey: TypeAlias = tuple[int, tuple[object, ...], int, tuple[tuple[int, int, int, int], ...]]

_ORDER: Final = {kind: place for place, kind in enumerate(KINDS)}


@functools.lru_cache(maxsize=4096)
def _spec_key(spec: CacheSpec) -> tuple[object, ...]:
    return tuple(simplicity_key(spec))


def operation_key(operation: Operation) -> tuple[int, int, int, int]:
    """Return an operation as numbers: its kind's place in the list of kinds, and its arguments."""
    return _ORDER[operation.kind], operation.a, operation.b, operation.c


def trace_key(trace: Trace) -> TraceKey:
    """Return the key of ``trace``: the smaller, the simpler."""
    operations = trace.operations
    total = sum(operation.a + operation.b + operation.c for operation in operations)
    return len(operations), _spec_key(trace.spec), total, tuple([operation_key(entry) for entry in operations])


def size(trace: Trace) -> int:
    """Return the size of a trace: its operations."""
    return len(trace.operations)
