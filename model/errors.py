"""The one error of bad input, and the checks that raise it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

MAX_PATH_CHARACTERS: Final = 120
"""Longest path that an error shows whole."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class SpecError(ValueError):
    """Bad input: names the field, the value found and the value needed, in one line.

    ``field`` is a dotted path such as ``layers[3].head_dim``; ``problem`` is the rest of the sentence.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}" if field else problem)


def shown(value: object) -> str:
    """Return ``value`` as an error message shows it: at most 60 characters on one line, however large the value."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return (
            f"a whole number of {value.bit_length()} bits"  # str() of a huge int is slow, and refused past 4300 digits
        )
    try:
        text = repr(value)
    except Exception:  # somebody else's object
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as every error message shows it: normal, printable, of a long one the end, which says more."""
    text = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(Path(path)))
    return text if len(text) <= MAX_PATH_CHARACTERS else "..." + text[3 - MAX_PATH_CHARACTERS :]


def without_byte_order_mark(text: bytes) -> bytes:
    """Return UTF-8 text without the byte order mark that some editors write in front."""
    return text.removeprefix(_BYTE_ORDER_MARK)


def require_int(field: str, value: object, low: int, high: int) -> int:
    """Return ``value`` if it is a whole number from ``low`` to ``high``; raise ``SpecError`` naming the range if
    not."""
    if type(value) is not int or not low <= value <= high:
        raise SpecError(field, f"found {shown(value)}, needs a whole number from {low} to {high}")
    return value


def require_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ``SpecError`` listing ``choices`` unless ``value`` is one of them."""
    if value not in choices:
        raise SpecError(field, f"found {shown(value)}, needs one of {', '.join(choices)}")


def require_members(field: str, value: object, kind: type | tuple[type, ...], what: str) -> tuple[Any, ...]:
    """Return a list or tuple as a tuple, after checking that every member is of ``kind`` (``what`` in the error)."""
    if not isinstance(value, list | tuple):
        raise SpecError(field, f"found {shown(value)}, needs a tuple, each member {what}")
    for index, member in enumerate(value):
        if not isinstance(member, kind) or (kind is int and isinstance(member, bool)):
            raise SpecError(f"{field}[{index}]", f"found {shown(member)}, needs {what}")
    return tuple(value)
