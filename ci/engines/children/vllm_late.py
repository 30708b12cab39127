"""vLLM from 0.30 on (era 3): one backing per worker, which all groups overlay, in six physical orders."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from described import described
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_engine import bare_seconds, kernel_tokens

PAGE_AXES = ("block", "head", "token", "content")


class Planner:
    """Plans all stages of a request, and makes the views of one of them with the engine's own code."""

    def __init__(self, version: str, era: int) -> None:
        self.greeting = {"engine": "vLLM", "version": version, "era": era}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the plan of one stage and where its views lie; for ``bare`` requests the seconds that they take."""
        if "bare" in request:
            return {"bare": bare_seconds(self, request["bare"])}
        if "cache" in request:
            return dict(self.caches.answer(request))
        plan, views = self.made(self.prepared(request))
        mine = {entry["name"]: entry for entry in request["stages"][request["stage"]]}
        group_of = {name: number for number, group in enumerate(plan.kv_cache_groups) for name in group.layer_names}
        found = []
        for name, view in views.items():
            if mine[name]["kind"] != "recurrent":
                found.append((name, 0, group_of[name], PAGE_AXES, view))
                continue
            for part, state in enumerate(states_of(mine[name], view)):
                axes = ("block", *mine[name]["axes"][part])
                found.append((name, part, group_of[name], axes, state))
        return {
            "blocks": plan.num_blocks,
            "groups": [list(group.layer_names) for group in plan.kv_cache_groups],
            **regions(described(found), plan),
        }

    @functools.cached_property
    def caches(self) -> Any:
        """What drives the cache manager; loaded when it is first asked for."""
        return importlib.import_module("vllm_cache").Caches(self)

    def prepared(self, request: dict[str, Any]) -> tuple[dict[str, Any], KVCacheLayout, Any, list[dict[str, Any]]]:
        """Return the request, and what the engine is given for it: order, configuration, and specs by stage."""
        order = KVCacheLayout[request["order"]]
        stages = [{entry["name"]: spec_of(entry) for entry in stage} for stage in request["stages"]]
        return request, order, configuration(order), stages

    def made(self, asked: tuple[dict[str, Any], KVCacheLayout, Any, list[dict[str, Any]]]) -> tuple[Any, Any]:
        """Return the plan of the stage asked for, and its views."""
        request, order, _, _ = asked
        plan = self.planned(asked)
        sizes = kernel_tokens(plan, request) if "kernel" in request else None
        return plan, allocate_kv_cache(plan, torch.device(request.get("device", "meta")), order, sizes)

    def planned(self, asked: tuple[dict[str, Any], KVCacheLayout, Any, list[dict[str, Any]]]) -> Any:
        """Return the plan of the stage asked for: of the given memory, or of exactly so many blocks."""
        request, order, config, stages = asked
        # as if every backend could read this order alone
        resolve_kv_cache_layout(config, [[order.name]], [spec for stage in stages for spec in stage.values()])
        groups = planning.get_global_kv_cache_groups(config, [dict(stage) for stage in stages])
        if request["bytes"] is not None:
            return planning.get_kv_cache_configs(config, stages, request["bytes"], groups)[request["stage"]]
        mine = planning._project_kv_cache_groups_to_worker(groups, stages[request["stage"]])
        builder = get_kv_cache_config_builder(config)
        return builder.get_kv_cache_config_from_groups(config, mine, request["blocks"])


def regions(found: dict[str, Any], plan: Any) -> dict[str, Any]:
    """Return ``found`` with the one allocation cut up where one group has blocks of several sizes, layers outermost.

    Each tensor of the plan is a run of blocks then, behind the last one; elsewhere all blocks have one stride.
    """
    tensors = plan.kv_cache_tensors
    if len({tensor.block_stride for tensor in tensors}) < 2:
        return found
    place = {name: number for number, tensor in enumerate(tensors) for name in tensor.layers}
    for view in found["views"]:
        view["allocation"] = place[view["name"]]
        view["offset"] -= tensors[view["allocation"]].offset
    ends = [*[tensor.offset for tensor in tensors[1:]], tensors[0].size]
    found["allocations"] = [end - tensor.offset for tensor, end in zip(tensors, ends, strict=True)]
    return found


def states_of(entry: dict[str, Any], view: Any) -> list[Any]:
    """Return the states that a recurrent layer makes of its page, by the engine's own code."""
    shapes = [tuple(shape) for shape in entry["shapes"]]
    dtypes = tuple(getattr(torch, dtype) for dtype in entry["dtypes"])
    layer = SimpleNamespace(get_state_shape=lambda: shapes, get_state_dtype=lambda: dtypes)
    MambaBase.bind_kv_cache(layer, view)
    return list(layer.kv_cache)


def spec_of(entry: dict[str, Any]) -> Any:
    """Return the engine's spec of one layer."""
    if entry["kind"] == "recurrent":
        return kinds.MambaSpec(
            block_size=entry["block"],
            shapes=tuple(tuple(shape) for shape in entry["shapes"]),
            dtypes=tuple(getattr(torch, dtype) for dtype in entry["dtypes"]),
            page_size_padded=entry["padded"],
        )
    common = {
        "block_size": entry["block"],
        "num_kv_heads": entry["heads"],
        "head_size": entry["dim"],
        "dtype": getattr(torch, entry["dtype"]),
        "page_size_padded": entry["padded"],
    }
    if entry["kind"] == "attention":
        common["head_size_v"] = entry["value_dim"]
        if "slots" in entry:
            common |= {"num_head_slots": entry["slots"], "state_content_bytes": entry["content"]}
        if entry["window"] is not None:
            return kinds.SlidingWindowSpec(**common, sliding_window=entry["window"])
        return kinds.FullAttentionSpec(**common)
    if entry["window"] is not None:
        return kinds.SlidingWindowMLASpec(**common, sliding_window=entry["window"], cache_dtype_str="auto")
    role = kinds.SparseCacheRole.INDEXER if entry["kind"] == "index" else kinds.SparseCacheRole.SPARSE
    return kinds.MLAAttentionSpec(**common, cache_role=role)


def configuration(order: KVCacheLayout) -> Any:
    """Return the part of vLLM's configuration that the planner reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=0),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            kv_cache_layout=None,
            get_resolved_kv_cache_layout=lambda: order,
            prefix_cache_retention_interval=None,
            mamba_cache_mode="none",
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(max_model_len=1, original_max_model_len=1, supports_kv_cache_grouping=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        speculative_config=None,
        kv_transfer_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=1,
    )
