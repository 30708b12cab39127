"""``Rejected``: an allocator's explained refusal of a spec."""

from __future__ import annotations

from typing import Final

import msgspec

from .finding import Where

MAX_TEXT_CHARACTERS: Final = 4000
"""What is longer loses its end: a case must stay a file that can be loaded."""


class Rejected(Exception):
    """An allocator refuses a spec: ``message`` names the cause, ``remedy`` the way out.

    ``supported`` says whether the spec lies inside what the allocator declares to support: refusing such a spec is a
    fault of the
    allocator, refusing another is its right. ``rule`` is ``rejected``, or ``unexplained-rejection`` for an error that
    explains nothing.
    """

    def __init__(
        self,
        message: str,
        remedy: str,
        *,
        where: tuple[Where, ...] = (),
        supported: bool = True,
        rule: str = "rejected",
    ) -> None:
        super().__init__(message)
        # foreign allocators may pass anything; what is saved and printed must be text, and a rule that exists
        self.message = _text(message) or "the allocator gave no reason"
        self.remedy = _text(remedy) if isinstance(remedy, str) else "let the allocator say what to do"
        self.where = _places(where)
        self.supported = supported
        self.rule = rule if rule == "unexplained-rejection" else "rejected"


def _text(value: object) -> str:
    """Return a text that UTF-8 can write (not lone surrogates, as file names have) and of bounded length."""
    if not isinstance(value, str):
        return ""
    text = value if len(value) <= MAX_TEXT_CHARACTERS else value[: MAX_TEXT_CHARACTERS - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def _places(where: object) -> tuple[Where, ...]:
    """Return the places, none where they are not what they should be."""
    if not where:
        return ()
    try:
        return msgspec.json.decode(msgspec.json.encode(where), type=tuple[Where, ...])
    except (TypeError, ValueError, msgspec.MsgspecError):
        return ()
