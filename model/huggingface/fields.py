"""Typed access to the fields of a decoded config.

An explicit null counts as absent everywhere: transformers writes null for a default. ``require`` reports all absent
fields in one error, before any of them is read; every reader then checks one field's type and range. What is concluded
rather than read goes to ``inferred`` as a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import SpecError, require_int, shown
from ..formats import ElementFormat, element_format
from ..layers import MAX_DIM

MAX_LAYERS: Final = 10_000
"""Most layers that a model may have; checked before anything of that length is made."""


def shown_briefly(value: object) -> str:
    """Return ``value`` for a message, without the cost (or the recursion) of a large value's ``repr``."""
    if value is None or type(value) in (bool, int, float):
        return shown(value)
    if isinstance(value, str):
        return shown(str(value[:100]))
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return f"a value of type {one_line(type(value).__name__)[:40]}"


def one_line(text: str) -> str:
    """Return ``text`` with a question mark for whatever does not print, line breaks among them."""
    return "".join(character if character.isprintable() else "?" for character in text)


class Fields:
    """One level of a config.

    ``prefix`` (``"text_config."``) precedes field names in errors; all levels of a config share one ``inferred``.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", inferred: list[str] | None = None) -> None:
        self.values = values
        self.prefix = prefix
        self.inferred: list[str] = [] if inferred is None else inferred

    def infer(self, sentence: str) -> None:
        """Record a conclusion, once."""
        if sentence not in self.inferred:
            self.inferred.append(sentence)

    def error(self, name: str, problem: str) -> SpecError:
        """Return (not raise) the error of field ``name``."""
        return SpecError(self.prefix + name, problem)

    def has(self, name: str) -> bool:
        """Return whether ``name`` is there and not null."""
        return self.values.get(name) is not None

    def first(self, *names: str) -> str:
        """Return the first of ``names`` that is there, else the first."""
        return next((name for name in names if self.has(name)), names[0])

    def require(self, *names: str) -> None:
        """Raise one error that lists every absent field; ``"a|b"`` needs either."""
        missing = [name for name in names if not any(map(self.has, name.split("|")))]
        if missing:
            level = f" in {self.prefix[:-1]}" if self.prefix else ""
            listed = ", ".join(name.replace("|", " or ") for name in missing)
            raise SpecError(listed, f"missing{level}, needs {'a value' if len(missing) == 1 else 'values'}")

    def whole(self, name: str, low: int = 1, high: int = MAX_DIM) -> int:
        """Return a whole number that must be there."""
        value = self.values.get(name)
        if value is None:
            raise self.error(name, f"missing, needs a whole number from {low} to {high}")
        if type(value) is not int:
            raise self.error(name, f"found {shown_briefly(value)}, needs a whole number from {low} to {high}")
        return require_int(self.prefix + name, value, low, high)

    def optional_whole(self, name: str, low: int = 1, high: int = MAX_DIM) -> int | None:
        """Return a whole number, or None if it is absent."""
        return self.whole(name, low, high) if self.has(name) else None

    def flag(self, name: str) -> bool | None:
        """Return true, false, or None if it is absent."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.error(name, f"found {shown_briefly(value)}, needs true or false")

    def text(self, name: str, most: int = MAX_LAYERS) -> str | None:
        """Return a string of at most ``most`` characters, or None if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not str or not 1 <= len(value) <= most:
            raise self.error(name, f"found {shown_briefly(value)}, needs a string of 1 to {most} characters")
        return value

    def entries(self, name: str) -> list[Any]:
        """Return a list of at most ``MAX_LAYERS`` entries that must be there."""
        value = self.values.get(name)
        if not isinstance(value, (list, tuple)) or len(value) > MAX_LAYERS:
            raise self.error(name, f"found {shown_briefly(value)}, needs a list of at most {MAX_LAYERS} entries")
        return list(value)

    def indices(self, name: str, low: int, high: int) -> list[int]:
        """Return a list of distinct layer numbers from ``low`` to ``high``."""
        entries = self.entries(name)
        for position, value in enumerate(entries):
            if type(value) is not int or not low <= value <= high:
                found = shown_briefly(value)
                raise self.error(f"{name}[{position}]", f"found {found}, needs a layer number from {low} to {high}")
        if len(set(entries)) != len(entries):
            raise self.error(name, "found a layer number twice, needs each once")
        return entries

    def format(self, name: str, allowed: tuple[ElementFormat, ...]) -> ElementFormat | None:
        """Return an element format among ``allowed``, or None if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value).__module__ == "torch":
            value = str(value)  # a torch.dtype, as older versions of to_dict() leave it
        if isinstance(value, ElementFormat) or not isinstance(value, str):
            raise self.error(name, f"found {shown_briefly(value)}, needs the name of a dtype such as bfloat16")
        found = element_format(value[:100], self.prefix + name)
        if found not in allowed:
            names = ", ".join(member.value for member in allowed)
            raise self.error(name, f"found {shown_briefly(value)}, needs one of {names}")
        return found

    def sub(self, name: str) -> Fields | None:
        """Return the object in field ``name`` as a level of its own, or None if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"found {shown_briefly(value)}, needs an object")
        return Fields(value, f"{self.prefix}{name}.", self.inferred)
