"""What travels between the supervisor and its children: frames of MessagePack, each after its length in bytes."""

from __future__ import annotations

import os
import select
from typing import Any, Final, TypeVar

import msgspec

from ...sim.cache.trace import Trace
from ...sim.finding import Finding
from ...sim.layout import Layout

T = TypeVar("T")
_LENGTH_BYTES: Final = 8
_MAX_READ: Final = 1 << 20


class TraceWork(msgspec.Struct, frozen=True, tag=True):
    """A trace, and the allocator (by name) whose running cache carries it out."""

    trace: Trace
    allocator: str


class LayoutWork(msgspec.Struct, frozen=True, tag=True):
    """A layout."""

    layout: Layout


class Task(msgspec.Struct, frozen=True):
    """A layout or a trace to be replayed; ``number`` tells its answer apart."""

    number: int
    work: LayoutWork | TraceWork


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a child: its device, and the versions of what runs there."""

    device: str
    versions: dict[str, str]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What memory says of one layout or trace; see ``kvsan.kernels.replay.Replayed`` and ``traces.TraceReplayed``.

    ``static_rules`` are the rules of memory that the simulator breaks on the same input, ``size_bytes`` what its pools
    take.
    """

    number: int
    digest: str | None
    findings: tuple[Finding, ...]
    refusal: str | None
    notes: tuple[str, ...]
    static_rules: tuple[str, ...]
    compared_on_host: bool
    size_bytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The last frame of a batch."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last frame of a child: ``kind`` is ``unusable`` where no device can be opened, ``crashed`` otherwise."""

    kind: str
    message: str


Frame = Hello | Answer | Done | Failed
ENCODER: Final = msgspec.msgpack.Encoder()
FRAMES: Final = msgspec.msgpack.Decoder(Frame)
TASKS: Final = msgspec.msgpack.Decoder(list[Task])


class Gone(Exception):
    """The other end has closed its pipe."""


class Late(Exception):
    """Nothing has come in time."""


def send(descriptor: int, message: Any) -> None:
    """Write one frame; raises ``Gone`` when nobody reads."""
    body = ENCODER.encode(message)
    held = memoryview(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    try:
        while held:
            held = held[os.write(descriptor, held) :]
    except OSError as error:
        raise Gone from error


def receive(descriptor: int, decoder: msgspec.msgpack.Decoder[T], seconds: float | None = None) -> T:
    """Read one frame; raises ``Gone`` at its end, ``Late`` where no byte comes for ``seconds``."""
    length = int.from_bytes(_exactly(descriptor, _LENGTH_BYTES, seconds), "little")
    return decoder.decode(_exactly(descriptor, length, seconds))


def _exactly(descriptor: int, count: int, seconds: float | None) -> bytes:
    parts = []
    while count:
        if seconds is not None and not select.select([descriptor], [], [], seconds)[0]:
            raise Late
        part = os.read(descriptor, min(count, _MAX_READ))
        if not part:
            raise Gone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
