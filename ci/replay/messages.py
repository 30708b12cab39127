"""What parent and child say to each other: msgpack, each message behind its length, over two pipes of their own.

    parent -> child   Start, then a Batch at a time
    child -> parent   Ready or Unusable, then for each batch its Answers in any order, and Done (or Failed)

Jobs are numbered within their batch. Neither side's standard output takes part, whatever prints there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from ...sim.cache.trace import Trace
from ...sim.finding import Finding, Where
from ...sim.layout import Layout
from ...sim.rejection import Rejected

MAX_FRAME_BYTES: Final = 1 << 30
"""Longest message in bytes; a longer one is garbage."""
_LENGTH: Final = struct.Struct("<I")

Status: TypeAlias = Literal["clean", "findings", "rejected", "refused", "crashed", "bad-input"]


class Refusal(msgspec.Struct, frozen=True):
    """An allocator's refusal of a spec, as ``kvsan check --json`` gives it."""

    rule: str
    message: str
    remedy: str
    where: tuple[Where, ...]
    supported: bool


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """What came of one case.

    ``clean`` and ``findings`` have been replayed: ``digest`` is that of all bytes after each pass, ``size_bytes`` the
    bytes of the pools. ``rejected``: the allocator refused the spec. ``refused``: it cannot be replayed (too large, too
    scattered, inconsistent), ``message`` says why. ``crashed``: the child process died on it or did not end, or the
    replay itself failed. ``bad-input``: the file is no case. ``compared_on_host`` says that every byte was brought back
    and compared on the host as well.
    """

    status: Status
    digest: str | None = None
    findings: tuple[Finding, ...] = ()
    rejection: Refusal | None = None
    message: str | None = None
    notes: tuple[str, ...] = ()
    size_bytes: int = 0
    compared_on_host: bool = False

    @classmethod
    def rejected(cls, rejection: Rejected) -> Outcome:
        """Return the outcome of a spec that its allocator refused."""
        refusal = Refusal(
            rule=rejection.rule,
            message=rejection.message,
            remedy=rejection.remedy,
            where=rejection.where,
            supported=rejection.supported,
        )
        return cls(status="rejected", rejection=refusal)


class SpecJob(msgspec.Struct, frozen=True, tag="spec"):
    """A spec (its canonical text) for the child to allocate; ``allocator`` is one of the shipped ones."""

    spec: bytes
    allocator: str


class LayoutJob(msgspec.Struct, frozen=True, tag="layout"):
    """A layout that exists already: that of an allocator of somebody's own."""

    layout: Layout


class TraceJob(msgspec.Struct, frozen=True, tag="trace"):
    """A trace, and the allocator (by name) whose running cache carries it out."""

    trace: Trace
    allocator: str


Job: TypeAlias = SpecJob | LayoutJob | TraceJob


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: the device to open, the bytes of it that one case may take, and what else to judge.

    ``static`` says whether the rules run too, ``kernels`` which reference kernels do (None: none).
    """

    device: str
    max_bytes: int
    static: bool
    kernels: str | None = None


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Cases that may share launches."""

    jobs: tuple[Job, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The device is open: its name, and the versions of what drives it."""

    device_name: str
    versions: dict[str, str]


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """The device cannot be opened: a ``SpecError`` on its way to the user."""

    field: str
    problem: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What came of job ``number`` of the batch."""

    number: int
    outcome: Outcome


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The batch is answered, and the child waits for the next one."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rest of the batch is not answered: an error, after which the device still works (``alive``) or not."""

    problem: str
    alive: bool


Request: TypeAlias = Start | Batch
Reply: TypeAlias = Ready | Unusable | Answer | Done | Failed

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_REPLIES: Final = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """Return ``message`` as it goes over a pipe. Raises ``ValueError`` for one that is too long."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} B, needs at most {MAX_FRAME_BYTES} B")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes as they come, cut into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are whole once ``data`` has come. Raises ``ValueError`` on an absurd length."""
        self._held += data
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length} B, needs at most {MAX_FRAME_BYTES} B")
            end = _LENGTH.size + length
            if len(self._held) < end:
                return
            body = bytes(memoryview(self._held)[_LENGTH.size : end])
            del self._held[:end]
            yield body


def decode_request(body: bytes) -> Request:
    """Return the request in ``body``. Raises ``msgspec.DecodeError`` for anything else."""
    return _REQUESTS.decode(body)


def decode_reply(body: bytes) -> Reply:
    """Return the reply in ``body``. Raises ``msgspec.DecodeError`` for anything else."""
    return _REPLIES.decode(body)
