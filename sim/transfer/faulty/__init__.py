"""Transfers that are wrong on purpose, each a small variation of the sound one; ``docs/faults.md`` tells them."""

from __future__ import annotations

from typing import Final

from ....model.errors import SpecError, shown
from ..method import Method
from ..planning import SOUND
from .cutting import CUTTING
from .pairing import PAIRING

FAULTY_TRANSFERS: Final[tuple[Method, ...]] = (*PAIRING, *CUTTING)
"""All of them."""


def method_named(name: str) -> Method:
    """Return the transfer called ``name``: the sound one, or a fault; raise ``SpecError`` listing them."""
    for method in (SOUND, *FAULTY_TRANSFERS):
        if method.name == name:
            return method
    known = ", ".join(method.name for method in (SOUND, *FAULTY_TRANSFERS))
    raise SpecError("transfer", f"unknown transfer {shown(name)}, needs one of {known}")
