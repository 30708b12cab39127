"""The shipped vLLM allocators by name.

``kernel_tokens``, for callers from Python, are the tokens of the blocks that attention kernels see; the planner's block
must be a whole number of them. It moves heads and halves inside a page, never a page.
"""

from __future__ import annotations

from ....model.errors import require_choice, require_int
from ....model.spec import CacheSpec
from ...layout import Layout
from .overlay import ORDERS, lay_out_overlay
from .slot_tensors import lay_out_packed, lay_out_slot_tensors


def allocate_e1(spec: CacheSpec, *, kernel_tokens: int | None = None) -> Layout:
    """Return the layout of ``vllm-e1``: a tensor per place in a group, all K before all V; or raise ``Rejected``."""
    return lay_out_slot_tensors(spec, 1, "vllm-e1", _checked(kernel_tokens))


def allocate_e2(spec: CacheSpec, *, kernel_tokens: int | None = None) -> Layout:
    """Return the layout of ``vllm-e2``: a tensor per place in a group, block by block; or raise ``Rejected``."""
    return lay_out_slot_tensors(spec, 2, "vllm-e2", _checked(kernel_tokens))


def allocate_e2_packed(spec: CacheSpec) -> Layout:
    """Return the layout of ``vllm-e2-packed``: one allocation, blocks of all places; or raise ``Rejected``."""
    return lay_out_packed(spec, "vllm-e2-packed")


def allocate_e3(spec: CacheSpec, *, order: str | None = None, kernel_tokens: int | None = None) -> Layout:
    """Return the layout of ``vllm-e3``, by default ``LBNHC`` or ``LBHNC`` as the consumer's ``kv_layout`` says.

    ``order`` is one of ``overlay.ORDERS``. Raises ``Rejected``, and ``SpecError`` for another order.
    """
    if order is None:
        order = "LBNHC" if spec.consumer.kv_layout == "NHD" else "LBHNC"
    require_choice("order", order, ORDERS)
    return lay_out_overlay(spec, "vllm-e3", order, _checked(kernel_tokens))


def allocate_e3_block_outermost(spec: CacheSpec) -> Layout:
    """Return the layout of ``vllm-e3-block-outermost``: ``BLNHC`` or ``BLHNC``; or raise ``Rejected``."""
    order = "BLNHC" if spec.consumer.kv_layout == "NHD" else "BLHNC"
    return lay_out_overlay(spec, "vllm-e3-block-outermost", order)


def _checked(kernel_tokens: int | None) -> int | None:
    return None if kernel_tokens is None else require_int("kernel_tokens", kernel_tokens, 1, 1 << 16)
