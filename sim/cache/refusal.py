"""``Refused``: a running cache says no, and nothing has changed."""

from __future__ import annotations

from typing import Final

REASONS: Final[dict[str, str]] = {
    "unknown-request": "no request of that number is there",
    "known-request": "a request of that number is there already",
    "no-tokens": "an operation on 0 tokens",
    "table-width": "the sequence would be longer than a row of the page table",
    "no-room": "not enough slots, the evictable ones counted in",
    "suspended": "the request is suspended",
    "not-suspended": "the request is not suspended",
    "not-supported": "this manager has no such operation",
    "below-history": "tokens that were accepted cannot be taken back",
    "state-cannot-rewind": "a recurrent state that has consumed a token cannot give it back",
    "nothing-waits": "no named request has a token waiting",
    "steps-in-flight": "two steps are in flight",
    "no-step": "no step is in flight",
    "nothing-to-commit": "no full block is written, accepted and unpublished",
    "beams": "the number of beams does not allow it",
    "tokens-wait": "tokens of the request wait or are in flight",
    "nothing-to-move": "no page can be moved to the other tier",
    "utilization": "more than 97 % of a group's slots are in use",
}
"""Every reason for which an operation is refused."""


class Refused(Exception):
    """The operation is refused for ``reason``, one of ``REASONS``; the text says it with the values found."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
