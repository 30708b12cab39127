"""KV formats: the one asked for or a refusal, and references that match exactly; both faults, by enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvsan.model.errors import SpecError
from kvsan.model.formats import KV_FORMATS, ElementFormat
from kvsan.model.selection import AccuracyReference, KvRequest, decide_kv_format, find_reference
from kvsan.model.selection.kv_dtype import FAULTY_POLICIES
from kvsan.strategies import accuracy_references, kv_requests

BF16, FP8, NVFP4 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4
FALLS_BACK, MISSING_IS_ANY = FAULTY_POLICIES
PLAIN = AccuracyReference(name="plain")
QUANTIZED = AccuracyReference(name="quantized", kv_format=FP8)


@pytest.mark.parametrize(
    ("request_", "effective"),
    [
        (KvRequest(), BF16),
        (KvRequest(requested=FP8), FP8),
        (KvRequest(checkpoint=FP8), FP8),
        (KvRequest(requested=NVFP4, checkpoint=FP8), NVFP4),
        (KvRequest(requested=NVFP4, supported=(BF16, FP8)), None),
        (KvRequest(checkpoint=NVFP4, supported=(BF16, FP8)), None),
        (KvRequest(supported=(FP8,)), None),
    ],
)
def test_the_format_is_the_one_asked_for_or_none(request_, effective) -> None:
    decision = decide_kv_format(request_)
    assert decision.effective is effective
    assert (decision.refusal is None) == (effective is not None)


def test_a_refusal_names_what_there_is() -> None:
    refused = decide_kv_format(KvRequest(requested=NVFP4, supported=(BF16, FP8)))
    assert refused.refusal == "the KV format nvfp4 is asked for, and the hardware or its kernels have only bf16, fp8"
    assert decide_kv_format(KvRequest(supported=())).refusal.endswith("have only none")


def test_a_reference_without_a_selector_stands_for_the_models_own_format_alone() -> None:
    assert find_reference((PLAIN, QUANTIZED), BF16, BF16) is PLAIN
    assert find_reference((PLAIN, QUANTIZED), BF16, FP8) is QUANTIZED
    assert find_reference((PLAIN,), BF16, FP8) is None
    assert find_reference((QUANTIZED,), BF16, BF16) is None
    assert find_reference((AccuracyReference(name="own", kv_format=BF16),), BF16, BF16) is not None
    assert find_reference((PLAIN,), ElementFormat.FP16, BF16) is None


def test_the_faults() -> None:
    request = KvRequest(requested=NVFP4, supported=(BF16, FP8))
    assert decide_kv_format(request, (), FALLS_BACK).effective is FP8
    assert decide_kv_format(KvRequest(requested=NVFP4, supported=(BF16,)), (), FALLS_BACK).effective is BF16
    assert decide_kv_format(KvRequest(requested=FP8), (PLAIN, QUANTIZED), MISSING_IS_ANY).reference is PLAIN
    assert decide_kv_format(KvRequest(), (PLAIN, QUANTIZED), MISSING_IS_ANY).reference is PLAIN


@settings(max_examples=200, deadline=None)
@given(kv_requests(), accuracy_references())
def test_whatever_is_asked(request_: KvRequest, references: tuple[AccuracyReference, ...]) -> None:
    decision = decide_kv_format(request_, references)
    wanted = request_.requested or request_.checkpoint or request_.model_format
    assert decision.effective is (wanted if wanted in request_.supported else None)
    if decision.effective is None:
        assert decision.reference is None
        return
    fitting = [
        entry
        for entry in references
        if entry.model_format is request_.model_format and (entry.kv_format or entry.model_format) is wanted
    ]
    assert decision.reference is (fitting[0] if fitting else None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requested": ElementFormat.INT64}, "requested: found <ElementFormat.INT64"),
        ({"model_format": None}, "model_format: found None, needs one of fp32"),
        ({"supported": ("fp8",)}, r"supported\[0\]: found 'fp8', needs an element format"),
    ],
)
def test_wrong_requests_are_named(fields, message) -> None:
    with pytest.raises(SpecError, match=message):
        KvRequest(**fields)
    assert KvRequest(supported=list(KV_FORMATS)).supported == KV_FORMATS
