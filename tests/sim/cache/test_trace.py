"""Operations and traces as data: what is accepted, how it is written, and how it reads."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kvsan.ci.cases import Case, decode_case, encode_case
from kvsan.model.errors import SpecError
from kvsan.model.layers import LatentLayer
from kvsan.model.spec import CacheSpec
from kvsan.sim.cache.trace import ARGUMENTS, COMMON_KINDS, KINDS, Operation, Trace, parents_of, requests_of, words

SPEC = CacheSpec(layers=(LatentLayer(latent_dim=8),), slots=2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("leave", 0), "found 'leave', needs one of admit, extend"),
        (("admit", 256), "found 256 in admit, needs 0 to 255"),
        (("admit", -1), "found -1 in admit, needs 0 to 255"),
        (("admit", 0, True), "found True in admit"),
        (("complete", 1), "found 1 as argument 1 of complete, which takes 0: needs 0"),
        (("extend", 0, 1, 2), "found 2 as argument 3 of extend, which takes 2"),
    ],
)
def test_operations_that_are_none(arguments, problem) -> None:
    with pytest.raises(SpecError, match=problem):
        Operation(*arguments)


def test_a_trace_needs_slots_and_operations() -> None:
    with pytest.raises(SpecError, match="found a byte quota, and a trace needs a number of slots"):
        Trace(spec=msgspec.structs.replace(SPEC, slots=None, quota_bytes=1 << 24))
    with pytest.raises(SpecError, match=r"operations\[0\]: found 3, needs an operation"):
        Trace(spec=SPEC, operations=(3,))
    with pytest.raises(SpecError, match="version: found 2, needs 1"):
        Trace(spec=SPEC, version=2)


def test_an_operation_takes_at_most_four_choices_below_256() -> None:
    assert all(len(names) <= 3 for names in ARGUMENTS.values())
    assert set(KINDS) - set(COMMON_KINDS) == {"suspend", "resume"}


def test_the_case_of_a_trace_comes_back_equal_and_its_text_is_canonical() -> None:
    trace = Trace(spec=SPEC, operations=(Operation("admit", 0, 3, 9), Operation("step", 1, 2), Operation("complete")))
    case = Case(allocator="trtllm-v2", input=trace)
    written = encode_case(case)
    assert decode_case(written) == case
    assert encode_case(decode_case(written)) == written
    assert b'"operations":[["admit",0,3,9],["step",1,2,0],["complete",0,0,0]]' in written
    assert case.digest != Case(allocator="trtllm-v2", input=SPEC).digest


def test_broken_operations_in_a_file_are_refused_in_one_line() -> None:
    trace = Trace(spec=SPEC, operations=(Operation("free", 1),))
    written = encode_case(Case(allocator="trtllm-v2", input=trace))
    for broken in (b'["free",1,0,300]', b'["free"', b'["fly",1,0,0]', b'["free",1,0,0,0]', b'["free",1,0,1]'):
        with pytest.raises(SpecError) as caught:
            decode_case(written.replace(b'["free",1,0,0]', broken))
        assert "\n" not in str(caught.value)


def test_words() -> None:
    spoken = {
        Operation("admit", 1, 1, 9): "admit request 1 with 1 token of text 9",
        Operation("step", 5, 2, 1): "dispatch a step of requests 0, 2, at most 2 tokens each, with 1 padding row",
        Operation("step", 0): "dispatch a step of no request",
        Operation("reorder", 0, 0b11_01_00_10): "let the beams of request 0 go on from beams 2, 0, 1, 3",
        Operation("offload", 1): "offload at most 2 pages",
        Operation("fork", 0, 4): "fork request 0 into 4 beams",
        Operation("suspend", 2): "suspend request 2",
    }
    assert {operation: words(operation) for operation in spoken} == spoken
    assert parents_of(0b11_01_00_10) == (2, 0, 1, 3)
    assert requests_of(0b101) == (0, 2)


def test_reading_a_trace_imports_no_numpy() -> None:
    code = "import sys, kvsan.ci.cases, kvsan.ci.faults; print({'numpy', 'hypothesis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
