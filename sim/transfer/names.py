"""What a case of a pair, or a campaign over pairs, is run with, by one name.

A name is ``transfer`` (the sound transfer, each side laid out by its spec's default allocator), ``fault:NAME`` of a
faulty transfer (the same allocators), or an allocator's name (the sound transfer between two of its layouts).
"""

from __future__ import annotations

from .faulty import FAULTY_TRANSFERS
from .method import Method
from .planning import SOUND


def transfer_named(name: str) -> tuple[Method, str | None]:
    """Return the transfer that ``name`` stands for, and the allocator of both sides, None for each spec's default.

    >>> method, allocator = transfer_named("fault:conv-state-as-one")
    >>> method.name, allocator
    ('fault:conv-state-as-one', None)
    >>> method, allocator = transfer_named("trtllm-v1")
    >>> method.name, allocator
    ('transfer', 'trtllm-v1')
    """
    if name == SOUND.name:
        return SOUND, None
    for method in FAULTY_TRANSFERS:
        if method.name == name:
            return method, None
    return SOUND, name


def is_faulty_transfer(name: str) -> bool:
    """Say whether ``name`` is that of a faulty transfer."""
    return any(method.name == name for method in FAULTY_TRANSFERS)
