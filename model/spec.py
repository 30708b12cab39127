"""``CacheSpec``: everything an allocator is told, frozen, validated, with one canonical JSON form.

    >>> spec = CacheSpec(layers=(AttentionLayer(kv_heads=8, head_dim=128),), parallel=ParallelLayout(tp=2))
    >>> decode_spec(encode_spec(spec)) == spec
    True

Equal specs give equal bytes: keys are sorted, every field is written, and every value has one spelling.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .architecture import SPARSE_ALGORITHMS, SparseAlgorithm
from .errors import SpecError, require_choice, require_int, require_members, shown
from .formats import KV_FORMATS, STATE_FORMATS, ElementFormat, element_format
from .layers import LAYER_KINDS, MAX_TOKENS, AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer
from .parallel import ParallelLayout, pipeline_stages

MAX_LAYERS: Final = 10_000
MAX_SLOTS: Final = 1 << 40
MAX_QUOTA_BYTES: Final = 1 << 60
MAX_SPEC_BYTES: Final = 64 << 20
"""Largest JSON text that ``decode_spec`` reads."""

__all__ = ["AttentionLayer", "CacheSpec", "Consumer", "Draft", "ParallelLayout", "decode_spec", "encode_spec"]


class Consumer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the kernels that read the cache need.

    ``kv_layout`` is the axis order inside a K/V page (HND: head, token, dim; NHD: token, head, dim). Every view's
    base, slot
    pitch and page must be a multiple of ``alignment_bytes`` (1: no need beyond the element size). ``index_bits`` is
    the width of
    the signed integer that holds a page index, ``offset_bits`` of the one that holds a byte offset.
    """

    kv_layout: Literal["HND", "NHD"] = "HND"
    alignment_bytes: int = 1
    index_bits: int = 32
    offset_bits: int = 64

    def __post_init__(self) -> None:
        require_choice("kv_layout", self.kv_layout, ("HND", "NHD"))
        require_int("alignment_bytes", self.alignment_bytes, 1, 1 << 20)
        if self.alignment_bytes & (self.alignment_bytes - 1):
            raise SpecError("alignment_bytes", f"found {self.alignment_bytes}, needs a power of two")
        for field in ("index_bits", "offset_bits"):
            if type(getattr(self, field)) is not int or getattr(self, field) not in (32, 64):
                raise SpecError(field, f"found {shown(getattr(self, field))}, needs 32 or 64")


class Draft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The draft model's layers, and who keeps their cache.

    ``folded``: appended to the target's layers on the last pipeline stage. ``separate``: a manager of their own, with
    its own
    pools and page table, on the last pipeline stage.
    """

    mode: Literal["none", "folded", "separate"] = "none"
    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        require_choice("draft.mode", self.mode, ("none", "folded", "separate"))
        layers = require_members("draft.layers", self.layers, LAYER_KINDS, "a layer")
        msgspec.structs.force_setattr(self, "layers", layers)
        if self.mode == "none" and self.layers:
            raise SpecError("draft.layers", f"found {len(self.layers)} layers with mode none, needs folded or separate")
        if self.mode != "none" and not self.layers:
            raise SpecError("draft.layers", f"found no layer with mode {self.mode}, needs at least one draft layer")
        if any(not isinstance(layer, AttentionLayer | LatentLayer) for layer in self.layers):
            raise SpecError("draft.layers", "found a layer without K/V pages, needs attention or latent layers")


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kvsan", tag="spec"):
    """Everything an allocator is told about one rank of one deployment.

    ``layers`` are the whole model's, in order. ``kv_format`` is that of K/V pages, ``state_format`` of the recurrent
    layers' temporal state, ``conv_format`` of their convolution state; ``tokens_per_block`` is the physical page.
    ``max_sequence_tokens`` clips windows: one at least that long is full attention. Either ``slots`` (of every group of
    pools that holds pages) with ``state_slots`` (of groups that hold recurrent states alone; None: as many as
    ``slots``), or ``quota_bytes`` for all pools together.
    """

    version: Literal[1] = 1
    model: str = ""
    layers: tuple[Layer, ...]
    kv_format: ElementFormat = ElementFormat.BF16
    state_format: ElementFormat = ElementFormat.BF16
    conv_format: ElementFormat = ElementFormat.BF16
    tokens_per_block: int = 32
    max_sequence_tokens: int | None = None
    parallel: ParallelLayout = ParallelLayout()
    rank: int = 0
    draft: Draft = Draft()
    sparse_algorithm: SparseAlgorithm | None = None
    slots: int | None = 4
    state_slots: int | None = None
    quota_bytes: int | None = None
    consumer: Consumer = Consumer()

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != 1:
            raise SpecError("version", f"found {shown(self.version)}, needs 1")
        if type(self.model) is not str or len(self.model) > 200 or not _is_text(self.model):
            raise SpecError("model", f"found {shown(self.model)}, needs a name of at most 200 characters")
        msgspec.structs.force_setattr(self, "layers", require_members("layers", self.layers, LAYER_KINDS, "a layer"))
        for field, kind in (("parallel", ParallelLayout), ("draft", Draft), ("consumer", Consumer)):
            if not isinstance(getattr(self, field), kind):
                raise SpecError(field, f"found {shown(getattr(self, field))}, needs a {kind.__name__}")
        if not 1 <= len(self.layers) + len(self.draft.layers) <= MAX_LAYERS or not self.layers:
            found = len(self.layers) + len(self.draft.layers)
            raise SpecError("layers", f"found {found}, needs 1 to {MAX_LAYERS} layers, draft layers included")
        self._check_formats()
        require_int("tokens_per_block", self.tokens_per_block, 1, 1 << 16)
        if self.max_sequence_tokens is not None:
            require_int("max_sequence_tokens", self.max_sequence_tokens, 1, MAX_TOKENS)
        self.parallel.coordinates(self.rank)
        pipeline_stages(len(self.layers), self.parallel.pp, self.parallel.pp_partition)
        if self.sparse_algorithm is not None:
            require_choice("sparse_algorithm", self.sparse_algorithm, SPARSE_ALGORITHMS)
        self._check_slots()

    def _check_formats(self) -> None:
        for field, allowed in (
            ("kv_format", KV_FORMATS),
            ("state_format", STATE_FORMATS),
            ("conv_format", STATE_FORMATS),
        ):
            value = element_format(getattr(self, field), field)
            msgspec.structs.force_setattr(self, field, value)  # a name such as "fp8" stands for its format
            if value not in allowed:
                raise SpecError(field, f"found {value.value}, needs one of {', '.join(f.value for f in allowed)}")

    def _check_slots(self) -> None:
        if (self.slots is None) == (self.quota_bytes is None):
            both = "both" if self.slots is not None else "neither"
            raise SpecError("slots", f"found {both} of slots and quota_bytes, needs exactly one of them")
        if self.slots is not None:
            require_int("slots", self.slots, 1, MAX_SLOTS)
        if self.state_slots is not None:
            require_int("state_slots", self.state_slots, 1, MAX_SLOTS)
        if self.quota_bytes is not None:
            require_int("quota_bytes", self.quota_bytes, 1, MAX_QUOTA_BYTES)

    @property
    def has_recurrent(self) -> bool:
        """Whether any layer of the model keeps a recurrent state."""
        return any(isinstance(layer, RecurrentLayer | HybridLayer) for layer in self.layers)


def _is_text(name: str) -> bool:
    """Whether JSON can hold ``name``: lone surrogates have no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


_DECODER = msgspec.json.Decoder(CacheSpec)


def encode_spec(spec: CacheSpec) -> bytes:
    """Return the canonical JSON text of ``spec``: keys sorted, every field present, no spaces, UTF-8."""
    return msgspec.json.encode(spec, order="sorted")


def decode_spec(text: bytes) -> CacheSpec:
    """Return the spec that ``text`` holds; raise ``SpecError`` naming the JSON path of what is wrong."""
    if len(text) > MAX_SPEC_BYTES:
        raise SpecError("", f"found {len(text)} bytes of JSON, needs at most {MAX_SPEC_BYTES}")
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError as error:
        raise SpecError("", one_line(str(error))) from None
    except RecursionError:
        raise SpecError("", "the JSON is nested too deeply") from None


def one_line(text: str) -> str:
    """Return ``text`` on one line of at most 300 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 300 else flat[:297] + "..."
