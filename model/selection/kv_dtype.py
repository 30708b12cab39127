"""The KV format that a run really has, and the accuracy reference that may be compared with it.

    >>> from kvsan.model.formats import ElementFormat
    >>> request = KvRequest(requested=ElementFormat.NVFP4, supported=(ElementFormat.BF16, ElementFormat.FP8))
    >>> decide_kv_format(request).refusal
    'the KV format nvfp4 is asked for, and the hardware or its kernels have only bf16, fp8'

A format is asked for by the user, else by the checkpoint's quantization, else it is the model's own. Whoever cannot
give it refuses. An accuracy reference says which KV format it was measured with; one that says nothing was measured
with the model's own, and stands for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ..errors import SpecError, require_members, shown
from ..formats import KV_FORMATS, ElementFormat


class KvRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for: by the user (``requested``, None: auto), by the checkpoint (``checkpoint``, None: nothing);
    ``supported`` is what hardware and kernels can store."""

    requested: ElementFormat | None = None
    checkpoint: ElementFormat | None = None
    model_format: ElementFormat = ElementFormat.BF16
    supported: tuple[ElementFormat, ...] = KV_FORMATS

    def __post_init__(self) -> None:
        for field in ("requested", "checkpoint", "model_format"):
            value = getattr(self, field)
            if value not in KV_FORMATS and not (value is None and field != "model_format"):
                raise SpecError(field, f"found {shown(value)}, needs one of {_words(KV_FORMATS)}")
        supported = require_members("supported", self.supported, ElementFormat, "an element format")
        msgspec.structs.force_setattr(self, "supported", supported)

    @property
    def asked(self) -> ElementFormat:
        """The one format that is asked for, whoever asks."""
        return self.requested or self.checkpoint or self.model_format


class AccuracyReference(msgspec.Struct, frozen=True, kw_only=True):
    """A measured accuracy: ``kv_format`` is its KV selector, None where the entry has none."""

    name: str
    model_format: ElementFormat = ElementFormat.BF16
    kv_format: ElementFormat | None = None

    @property
    def measured_with(self) -> ElementFormat:
        """The KV format that it was measured with: without a selector the model's own."""
        return self.kv_format or self.model_format


class KvPolicy(msgspec.Struct, frozen=True):
    """How an engine deals with formats. ``falls_back``: what is not supported becomes fp8, or else the model's own.
    ``missing_is_any``: a reference without a KV selector stands for every KV format."""

    name: str
    summary: str
    falls_back: bool = False
    missing_is_any: bool = False


SOUND_POLICY: Final = KvPolicy("consistent", "the requested KV format or a refusal, and references that match exactly")

FAULTY_POLICIES: Final = (
    KvPolicy(
        "fault:kv-dtype-falls-back",
        "a KV format that is not supported is replaced by another, and the run goes on",
        falls_back=True,
    ),
    KvPolicy(
        "fault:reference-without-kv-selector",
        "an accuracy reference that names no KV format is taken for a run with any",
        missing_is_any=True,
    ),
)
"""Policies that are wrong on purpose."""


class KvDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a run (None: refused, for the reason in ``refusal``) and the reference chosen for it."""

    policy: str
    request: KvRequest
    effective: ElementFormat | None = None
    refusal: str | None = None
    reference: AccuracyReference | None = None


def decide_kv_format(
    request: KvRequest, references: Sequence[AccuracyReference] = (), policy: KvPolicy = SOUND_POLICY
) -> KvDecision:
    """Return the effective KV format of a run, and the first of ``references`` that ``policy`` compares it with."""
    asked = request.asked
    effective = asked if asked in request.supported else None
    if effective is None and policy.falls_back:
        stand_ins = (ElementFormat.FP8, request.model_format)
        effective = next((stand_in for stand_in in stand_ins if stand_in in request.supported), None)
    if effective is None:
        why = f"the KV format {asked.value} is asked for, and the hardware or its kernels have only "
        return KvDecision(policy=policy.name, request=request, refusal=why + (_words(request.supported) or "none"))
    reference = find_reference(references, request.model_format, effective, policy)
    return KvDecision(policy=policy.name, request=request, effective=effective, reference=reference)


def find_reference(
    references: Sequence[AccuracyReference],
    model_format: ElementFormat,
    effective: ElementFormat,
    policy: KvPolicy = SOUND_POLICY,
) -> AccuracyReference | None:
    """Return the first reference for a model of ``model_format`` with KV in ``effective``, None where there is none."""
    for reference in references:
        if reference.model_format is not model_format:
            continue
        any_kv = policy.missing_is_any and reference.kv_format is None
        if any_kv or reference.measured_with is effective:
            return reference
    return None


def _words(formats: Sequence[ElementFormat]) -> str:
    return ", ".join(format.value for format in formats)
