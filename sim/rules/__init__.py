"""The rules: what must hold of every layout. Each module holds one rule, its text and its check."""

from __future__ import annotations

from . import (
    adjacency,
    alias,
    alignment,
    bounds,
    budget,
    follows_dense,
    head_map,
    index_scale,
    int32,
    kv_dtype,
    layer_map,
    manager,
    op_address,
    record_layout,
    rejections,
    running,
    sentinel,
    stride,
)
from .rule import Rule

RULES: tuple[Rule, ...] = (
    bounds.RULE,
    alias.RULE,
    stride.RULE,
    adjacency.RULE,
    index_scale.RULE,
    op_address.RULE,
    record_layout.RULE,
    int32.RULE,
    alignment.RULE,
    sentinel.RULE,
    head_map.RULE,
    layer_map.RULE,
    budget.RULE,
    kv_dtype.RULE,
    manager.RULE,
    follows_dense.RULE,
    rejections.REJECTED,
    rejections.UNEXPLAINED,
    running.NAMESPACE,
    running.CAPACITY,
    running.CONSERVATION,
    running.REFCOUNT,
    running.IN_FLIGHT,
    running.FRESHNESS,
    running.WINDOW,
    running.CACHE_KEY,
)
