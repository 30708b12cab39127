"""``Sequence``: one request as the cache sees it, and ``Contents``, which numbers the tokens up to a position."""

from __future__ import annotations

from .pages import Page
from .trace import TEXTS


class Contents:
    """Numbers for token prefixes: equal prefixes of one reuse scope have equal numbers, all others differ."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def next(self, before: int, token: int) -> int:
        """Return the number of the prefix ``before`` with ``token`` behind it."""
        key = (before, token)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers) + 1
        return number

    def prompt(self, text: int, tokens: int) -> list[int]:
        """Return the numbers of the first ``tokens`` prefixes of ``text``."""
        found: list[int] = []
        before = root_of(text)
        for position in range(tokens):
            before = self.next(before, token_of(text, position))
            found.append(before)
        return found


def root_of(text: int) -> int:
    """Return the number of the empty prefix of a text: one for each reuse scope."""
    return -1 - text // TEXTS  # floor: texts are numbered scope by scope


def token_of(text: int, position: int, beam: int = -1) -> int:
    """Return the token of ``text`` at ``position``; beams that were forked have tokens of their own."""
    branch = text % TEXTS
    return (0 if position < branch else branch) + TEXTS * (beam + 1)


class Sequence:
    """One request.

    ``history <= scheduled <= capacity`` and ``done <= scheduled``, all in tokens: accepted for good, given to a step,
    with room; written by completed steps. ``contents``, ``events`` and ``origin`` run over beams and positions:
    position p of beam b lies in the blocks of beam ``origin[b][p]`` (cache indirection). ``blocks`` runs over life
    cycles, beams and blocks; for a recurrent state there is one block per beam. ``sources`` are snapshots that the next
    step reads in place of the live state, by life cycle; ``state_events`` the events that the beams' states are at.
    """

    __slots__ = (
        "beams",
        "blocks",
        "capacity",
        "committed",
        "contents",
        "done",
        "events",
        "history",
        "origin",
        "prompt",
        "request",
        "scheduled",
        "sources",
        "state_events",
        "suspended",
        "text",
    )

    def __init__(self, request: int, text: int, contents: list[int], cycles: int) -> None:
        self.request = request
        self.text = text
        self.prompt = len(contents)
        self.beams = 1
        self.capacity = len(contents)
        self.scheduled = self.done = self.history = self.committed = 0
        self.contents = [contents]
        self.events: list[list[int]] = [[]]
        self.origin: list[list[int]] = [[0] * len(contents)]
        self.blocks: list[list[list[Page | None]]] = [[[]] for _ in range(cycles)]
        self.sources: dict[int, Page] = {}
        self.state_events = [0]
        self.suspended = False

    @property
    def waiting(self) -> int:
        """Tokens with room that no step was given yet."""
        return self.capacity - self.scheduled
