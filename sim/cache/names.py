"""Names of running caches, looked up without importing one (and so without NumPy)."""

from __future__ import annotations

from .faulty import faulty_entry


def layout_allocator(allocator: str) -> str:
    """Return the allocator whose layout a cache runs on: itself, or the base of a faulty cache.

    >>> layout_allocator("fault:block-id-is-slot"), layout_allocator("fault:canary")
    ('trtllm-v1', 'fault:canary')
    """
    entry = faulty_entry(allocator)
    return allocator if entry is None else entry.base
