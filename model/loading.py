"""``load``: from a model's files and the way it is deployed to a ``CacheSpec``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .architecture import Architecture
from .errors import SpecError, require_choice, shown_path, without_byte_order_mark
from .formats import ElementFormat, element_format
from .huggingface import read_architecture
from .parallel import ParallelLayout
from .spec import MAX_SPEC_BYTES, CacheSpec, Consumer, Draft, decode_spec

DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_SLOTS = 4


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is deployed; None is the default, or what a saved spec says.

    Sizes: ``tokens_per_block`` tokens, ``slots`` and ``state_slots`` slots, ``quota_bytes`` and ``alignment_bytes``
    bytes.
    """

    parallel: ParallelLayout | None = None
    rank: int | None = None
    kv_format: ElementFormat | None = None
    state_format: ElementFormat | None = None
    tokens_per_block: int | None = None
    slots: int | None = None
    state_slots: int | None = None
    quota_bytes: int | None = None
    draft: str | None = None
    kv_layout: str | None = None
    alignment_bytes: int | None = None


class LoadedSpec(msgspec.Struct, frozen=True):
    """A spec, and one sentence for each thing in it that was concluded rather than given."""

    spec: CacheSpec
    inferred: tuple[str, ...] = ()


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    layout: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    cp: int | None = None,
    attention_dp: bool | None = None,
    pp_partition: tuple[int, ...] | None = None,
    rank: int | None = None,
    kv_dtype: str | ElementFormat | None = None,
    state_dtype: str | ElementFormat | None = None,
    tokens_per_block: int | None = None,
    slots: int | None = None,
    state_slots: int | None = None,
    quota_bytes: int | None = None,
    draft: str | None = None,
    kv_layout: str | None = None,
    alignment_bytes: int | None = None,
) -> CacheSpec:
    """Return the spec of one rank of a deployed model.

    ``source`` is a Hugging Face ``config.json``, its folder or its dict, or a saved spec. The parallel layout is
    either named
    (``layout="tep4"``) or given by its degrees. Defaults: one rank, K/V in the model's dtype, 32 tokens per block, 4
    slots, no draft.
    Raises ``SpecError`` for anything that is missing, contradictory or out of range.
    """
    deployment = Deployment(
        parallel=parallel_layout(layout, tp, pp, ep, cp, attention_dp, pp_partition),
        rank=rank,
        kv_format=None if kv_dtype is None else element_format(kv_dtype, "kv_dtype"),
        state_format=None if state_dtype is None else element_format(state_dtype, "state_dtype"),
        tokens_per_block=tokens_per_block,
        slots=slots,
        state_slots=state_slots,
        quota_bytes=quota_bytes,
        draft=draft,
        kv_layout=kv_layout,
        alignment_bytes=alignment_bytes,
    )
    return deploy(read_source(source), deployment).spec


def parallel_layout(
    layout: str | None,
    tp: int | None,
    pp: int | None,
    ep: int | None,
    cp: int | None,
    attention_dp: bool | None,
    pp_partition: tuple[int, ...] | None,
) -> ParallelLayout | None:
    """Return the parallel layout that a name or degrees ask for, None when nothing is given; both together are an
    error."""
    degrees = {"tp": tp, "pp": pp, "ep": ep, "cp": cp, "attention_dp": attention_dp}
    given = {name: value for name, value in degrees.items() if value is not None}
    if layout is not None:
        if given:
            raise SpecError("layout", f"given together with {', '.join(given)}, needs either a name or the degrees")
        return ParallelLayout.parse(layout, pp_partition)
    if not given and pp_partition is None:
        return None
    if pp_partition is not None and pp is None:
        given["pp"] = len(pp_partition)
    return ParallelLayout(**given, pp_partition=pp_partition)  # type: ignore[arg-type]


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Architecture | CacheSpec:
    """Return what ``source`` holds: a saved spec, or the architecture of a Hugging Face config."""
    if isinstance(source, Mapping):
        return read_architecture(dict(source))
    path = Path(source)
    text = _saved_spec_text(path)
    if text is None:
        return read_architecture(path)
    try:
        return decode_spec(text)
    except SpecError as error:
        raise SpecError(shown_path(path), str(error)) from None


def _saved_spec_text(path: Path) -> bytes | None:
    """Return the text of a file that says it is one of ours (a top-level key ``kvsan``), None for any other."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_SPEC_BYTES:
            return None  # the config reader words these errors
        text = without_byte_order_mark(path.read_bytes())
        head = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return None
    return text if "kvsan" in head else None


def deploy(model: Architecture | CacheSpec, deployment: Deployment) -> LoadedSpec:
    """Return the spec of ``model`` deployed as ``deployment`` says, with what had to be inferred."""
    if isinstance(model, CacheSpec):
        return LoadedSpec(_redeploy(model, deployment))
    inferred = list(model.inferred)
    kv_format = deployment.kv_format
    if kv_format is None:
        kv_format = model.model_format or ElementFormat.BF16
        source = "the model's dtype" if model.model_format else "the model names no dtype"
        inferred.append(f"kv dtype {kv_format.value}: {source}, and none was asked for")
    model_format = model.model_format or ElementFormat.BF16
    state_format = deployment.state_format or model.state_format or model_format
    draft = Draft()
    if deployment.draft not in (None, "none"):
        require_choice("draft", deployment.draft, ("none", "folded", "separate"))
        if not model.draft_layers:
            raise SpecError("draft", f"found {deployment.draft}, but {model.name} has no draft layer, needs none")
        draft = Draft(mode=deployment.draft, layers=model.draft_layers)  # type: ignore[arg-type]
    slots = deployment.slots
    if slots is None and deployment.quota_bytes is None:
        slots = DEFAULT_SLOTS
    spec = CacheSpec(
        model=model.name,
        layers=model.layers,
        kv_format=kv_format,
        state_format=state_format,
        conv_format=model_format,
        tokens_per_block=_given(deployment.tokens_per_block, DEFAULT_TOKENS_PER_BLOCK),
        max_sequence_tokens=model.max_sequence_tokens,
        parallel=deployment.parallel or ParallelLayout(),
        rank=_given(deployment.rank, 0),
        draft=draft,
        sparse_algorithm=model.sparse_algorithm,
        slots=slots,
        state_slots=deployment.state_slots,
        quota_bytes=deployment.quota_bytes,
        consumer=_consumer(Consumer(), deployment),
    )
    return LoadedSpec(spec, tuple(inferred))


def _redeploy(spec: CacheSpec, deployment: Deployment) -> CacheSpec:
    """Return a saved spec with whatever the deployment gives instead of its own."""
    changes: dict[str, Any] = {
        field: getattr(deployment, field)
        for field in ("parallel", "rank", "kv_format", "state_format", "tokens_per_block", "state_slots")
        if getattr(deployment, field) is not None
    }
    if deployment.slots is not None or deployment.quota_bytes is not None:
        changes |= {"slots": deployment.slots, "quota_bytes": deployment.quota_bytes}
    if deployment.draft is not None and deployment.draft != spec.draft.mode:
        layers = () if deployment.draft == "none" else spec.draft.layers
        changes["draft"] = Draft(mode=deployment.draft, layers=layers)  # type: ignore[arg-type]
    if deployment.kv_layout is not None or deployment.alignment_bytes is not None:
        changes["consumer"] = _consumer(spec.consumer, deployment)
    return msgspec.structs.replace(spec, **changes) if changes else spec


def _consumer(consumer: Consumer, deployment: Deployment) -> Consumer:
    return msgspec.structs.replace(
        consumer,
        kv_layout=_given(deployment.kv_layout, consumer.kv_layout),
        alignment_bytes=_given(deployment.alignment_bytes, consumer.alignment_bytes),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
