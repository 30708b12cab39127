"""The rules: what must hold of every layout. Each module holds one rule, its text and its check."""

from __future__ import annotations

from . import (
    adjacency,
    alias,
    alignment,
    bounds,
    budget,
    head_map,
    index_scale,
    int32,
    kernel_result,
    layer_map,
    op_address,
    record_layout,
    rejections,
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
    kernel_result.RULE,
    rejections.REJECTED,
    rejections.UNEXPLAINED,
)
