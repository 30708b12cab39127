"""``Trace``: what a running cache is asked to do, as plain data.

    >>> [words(operation) for operation in (Operation("admit", 0, 3), Operation("step", 1))]
    ['admit request 0 with 3 tokens of text 0', 'dispatch a step of request 0']

An operation is a name and at most three numbers below 256, so a fuzzer needs at most four choices for it. Every
sequence of operations is a trace: one that asks the impossible is refused, and changes nothing.

Texts are numbered: text ``k`` starts with the first ``k`` tokens of text 0 and goes its own way then, and text
``k + 8 s`` is text ``k`` under reuse scope ``s`` (another LoRA adapter or cache salt: equal tokens, other bytes).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from ...model.errors import SpecError, require_members, shown
from ...model.spec import CacheSpec

MAX_OPERATIONS: Final = 100_000
MAX_ARGUMENT: Final = 255
TEXTS: Final = 8
"""Texts of one reuse scope."""
MAX_BEAMS: Final = 4

Kind: TypeAlias = Literal[
    "admit",
    "extend",
    "step",
    "complete",
    "rewind",
    "commit",
    "fork",
    "reorder",
    "free",
    "suspend",
    "resume",
    "offload",
    "onload",
]

ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "admit": ("request", "tokens", "text"),
    "extend": ("request", "tokens"),
    "step": ("requests", "chunk", "padding"),
    "complete": (),
    "rewind": ("request", "tokens"),
    "commit": ("request",),
    "fork": ("request", "beams"),
    "reorder": ("request", "parents"),
    "free": ("request",),
    "suspend": ("request",),
    "resume": ("request",),
    "offload": ("pages",),
    "onload": ("pages",),
}
"""The arguments of every operation.

``requests`` is a bit mask (bit ``i``: request ``i``); ``chunk`` the most tokens of each request (0: all that wait);
``padding`` the rows added to the batch; ``parents`` the parent of beam ``b`` as base-4 digit ``b``; ``pages`` one less
than the most pages moved.
"""

KINDS: Final = tuple(ARGUMENTS)
COMMON_KINDS: Final = tuple(kind for kind in KINDS if kind not in ("suspend", "resume"))
"""The operations that V1 and V2 have in common."""


class Operation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One operation; arguments that it does not take are 0."""

    kind: Kind
    a: int = 0
    b: int = 0
    c: int = 0

    def __post_init__(self) -> None:
        names = ARGUMENTS.get(self.kind)
        if names is None:
            raise SpecError("operations", f"found {shown(self.kind)}, needs one of {', '.join(KINDS)}")
        for place, value in enumerate((self.a, self.b, self.c)):
            if type(value) is not int or not 0 <= value <= MAX_ARGUMENT:
                raise SpecError("operations", f"found {shown(value)} in {self.kind}, needs 0 to {MAX_ARGUMENT}")
            if value and place >= len(names):
                problem = f"found {value} as argument {place + 1} of {self.kind}, which takes {len(names)}: needs 0"
                raise SpecError("operations", problem)


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kvsan", tag="trace"):
    """Operations on the cache of one rank; ``spec`` says which, its ``slots`` how many pages of every group there are.

    The host tier has as many slots as the device.
    """

    version: Literal[1] = 1
    spec: CacheSpec
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != 1:
            raise SpecError("version", f"found {shown(self.version)}, needs 1")
        if not isinstance(self.spec, CacheSpec):
            raise SpecError("spec", f"found {shown(self.spec)}, needs a spec")
        if self.spec.slots is None:
            raise SpecError("spec.slots", "found a byte quota, and a trace needs a number of slots")
        found = require_members("operations", self.operations, Operation, "an operation")
        msgspec.structs.force_setattr(self, "operations", found)
        if len(found) > MAX_OPERATIONS:
            raise SpecError("operations", f"found {len(found)}, needs at most {MAX_OPERATIONS}")


def words(operation: Operation) -> str:
    """Return an operation in words."""
    kind, a, b, c = operation.kind, operation.a, operation.b, operation.c
    if kind == "admit":
        return f"admit request {a} with {_counted(b, 'token')} of text {c}"
    if kind == "step":
        limit = f", at most {_counted(b, 'token')} each" if b else ""
        padding = f", with {_counted(c, 'padding row')}" if c else ""
        return f"dispatch a step of {_requests(a)}{limit}{padding}"
    if kind == "complete":
        return "complete the oldest step"
    if kind == "extend":
        return f"extend request {a} by {_counted(b, 'token')}"
    if kind == "rewind":
        return f"rewind request {a} by {_counted(b, 'token')}"
    if kind == "fork":
        return f"fork request {a} into {b} beams"
    if kind == "reorder":
        return f"let the beams of request {a} go on from beams {', '.join(map(str, parents_of(b)))}"
    if kind in ("offload", "onload"):
        return f"{kind} at most {_counted(a + 1, 'page')}"
    return f"{kind} request {a}"


def parents_of(code: int) -> tuple[int, ...]:
    """Return the parent of each of four beams: the base-4 digits of ``code``, the lowest first."""
    return tuple([code >> 2 * beam & 3 for beam in range(MAX_BEAMS)])


def requests_of(mask: int) -> tuple[int, ...]:
    """Return the requests whose bits are set in ``mask``."""
    return tuple([request for request in range(mask.bit_length()) if mask >> request & 1])


def _requests(mask: int) -> str:
    numbers = requests_of(mask)
    if len(numbers) == 1:
        return f"request {numbers[0]}"
    return f"requests {', '.join(map(str, numbers))}" if numbers else "no request"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
