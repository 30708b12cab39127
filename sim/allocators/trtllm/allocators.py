"""The TensorRT-LLM allocators as the registry names them."""

from __future__ import annotations

from ....model.spec import CacheSpec
from ...layout import Layout
from .manager_v1 import allocate_v1 as allocate_v1
from .manager_v2 import PolicyV2, allocate_v2

DENSE = PolicyV2("trtllm-v2", "unsupported")
QSA_LEGACY = PolicyV2("trtllm-v2-qsa-legacy", "separate")
QSA_PACKED = PolicyV2("trtllm-v2-qsa-packed", "packed-any-heads")
QSA_PACKED_RANK_LOCAL = PolicyV2("trtllm-v2-qsa-packed-rank-local", "packed-rank-local")


def allocate_dense(spec: CacheSpec) -> Layout:
    """Return the layout of ``trtllm-v2``."""
    return allocate_v2(spec, DENSE)


def allocate_qsa_legacy(spec: CacheSpec) -> Layout:
    """Return the layout of ``trtllm-v2-qsa-legacy``."""
    return allocate_v2(spec, QSA_LEGACY)


def allocate_qsa_packed(spec: CacheSpec) -> Layout:
    """Return the layout of ``trtllm-v2-qsa-packed``."""
    return allocate_v2(spec, QSA_PACKED)


def allocate_qsa_packed_rank_local(spec: CacheSpec) -> Layout:
    """Return the layout of ``trtllm-v2-qsa-packed-rank-local``."""
    return allocate_v2(spec, QSA_PACKED_RANK_LOCAL)
