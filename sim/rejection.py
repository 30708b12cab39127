"""``Rejected``: an allocator's explained refusal of a spec."""

from __future__ import annotations

from .finding import Where


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
        self.message = message if isinstance(message, str) and message else "the allocator gave no reason"
        self.remedy = remedy if isinstance(remedy, str) else "let the allocator say what to do"
        self.where = where
        self.supported = supported
        self.rule = rule if rule == "unexplained-rejection" else "rejected"
