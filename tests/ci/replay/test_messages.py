"""Messages arrive as they were sent, in whatever pieces, and garbage is refused before it takes memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsan.ci.replay.messages import (
    Answer,
    Batch,
    Done,
    Failed,
    FrameReader,
    LayoutJob,
    Outcome,
    Ready,
    SpecJob,
    Start,
    TraceJob,
    Unusable,
    decode_reply,
    decode_request,
    frame,
)
from kvsan.ci.replay.supervisor import ReplayOptions
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec
from kvsan.sim.cache.trace import Trace
from kvsan.sim.finding import Finding, Where
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected

SPEC = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=64),), slots=3)
LAYOUT = allocate(SPEC, "trtllm-v2")
TRACE = Trace(spec=SPEC, operations=())
FINDING = Finding(rule="alias", message="m", remedy="r", where=(Where(layer=3, first_byte=1 << 40),))
REPLIES = [
    Ready("a GPU", {"torch": "2"}),
    Unusable("device", "gone"),
    Answer(3, Outcome(status="findings", digest="d", findings=(FINDING,), notes=("n",), size_bytes=1 << 50)),
    Answer(0, Outcome.rejected(Rejected("no", "do", where=(Where(layer=1),), supported=False))),
    Done(),
    Failed("why", False),
]
REQUESTS = [
    Start("cpu", 1 << 40, True),
    Batch((SpecJob(b"\x00\xff", "x"), LayoutJob(LAYOUT), TraceJob(TRACE, "trtllm-v2"))),
]


@given(st.lists(st.integers(1, 40), min_size=1))
def test_messages_survive_any_pieces(sizes: list[int]) -> None:
    data = b"".join(map(frame, REPLIES))
    reader, found, place = FrameReader(), [], 0
    while place < len(data):
        for size in sizes:
            found += [decode_reply(body) for body in reader.feed(data[place : place + size])]
            place += size
    assert found == REPLIES


def test_requests_arrive_as_they_were_sent() -> None:
    assert [decode_request(body) for body in FrameReader().feed(b"".join(map(frame, REQUESTS)))] == REQUESTS


@pytest.mark.parametrize("body", [b"", b"\xc1", b"hello", msgspec.msgpack.encode({"type": "answer"}), b"\xff" * 99])
def test_garbage_is_no_message(body) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_reply(body)
    with pytest.raises(msgspec.MsgspecError):
        decode_request(body)


def test_an_absurd_length_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="a message of 4294967295 B"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))


def test_the_options_hold_no_surprises() -> None:
    options = ReplayOptions(device="cpu", max_bytes=1)
    assert (options.workers, options.static, options.wrapper) == (1, True, ())
