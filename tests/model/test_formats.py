from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsan.model.arithmetic import InexactDivision
from kvsan.model.errors import SpecError
from kvsan.model.formats import KV_FORMATS, SCALE_BLOCK_ELEMENTS, STATE_FORMATS, ElementFormat, element_format

BITS = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "nvfp4": 4,
    "int32": 32,
    "int64": 64,
    "uint8": 8,
}


def test_exact_bits() -> None:
    assert {member.value: member.bits for member in ElementFormat} == BITS


def test_containers() -> None:
    """The smallest piece a view can address: one element, or one byte of two nvfp4 elements."""
    for member in ElementFormat:
        packed = member is ElementFormat.NVFP4
        assert member.elements_per_container == (2 if packed else 1)
        assert member.container_bytes * 8 == member.bits * member.elements_per_container
        assert member.block_scaled == packed
    assert SCALE_BLOCK_ELEMENTS == 16


def test_members_of_equal_width_are_distinct() -> None:
    assert len(ElementFormat) == len(BITS)
    assert ElementFormat.FP16 is not ElementFormat.BF16
    assert ElementFormat("fp8") is ElementFormat.FP8


@given(member=st.sampled_from(list(ElementFormat)), elements=st.integers(0, 10**12))
def test_bytes_of_elements(member: ElementFormat, elements: int) -> None:
    if elements * member.bits % 8:
        with pytest.raises(InexactDivision, match=f"bits of {elements} {member.value} elements"):
            member.bytes_of(elements)
    else:
        assert member.bytes_of(elements) * 8 == elements * member.bits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, name) for name in BITS),
        ("torch.bfloat16", "bf16"),
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("torch.float32", "fp32"),
        ("float", "fp32"),
        ("float8_e4m3fn", "fp8"),
        ("torch.float8_e4m3fn", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("float8_e5m2", "fp8_e5m2"),
        ("fp4", "nvfp4"),
        (" BF16 ", "bf16"),
        ("torch.int8", "int8"),
        (ElementFormat.NVFP4, "nvfp4"),
    ],
)
def test_spellings(name: object, value: str) -> None:
    assert element_format(name) is ElementFormat(value)


@pytest.mark.parametrize("name", ["", "bf17", "fp", "torch.", "auto", None, 16, 1.5, True, ["bf16"], {}, "x" * 10**6])
def test_an_unknown_spelling_lists_the_known_ones(name: object) -> None:
    with pytest.raises(SpecError) as caught:
        element_format(name, "kv_dtype")
    message = str(caught.value)
    assert message.startswith("kv_dtype: unknown element format ")
    assert message.endswith(f"needs one of {', '.join(BITS)}")
    assert len(message) < 250


def test_what_may_be_cached() -> None:
    assert [member.value for member in KV_FORMATS] == ["fp32", "fp16", "bf16", "fp8", "fp8_e5m2", "int8", "nvfp4"]
    assert [member.value for member in STATE_FORMATS] == ["fp32", "fp16", "bf16"]
