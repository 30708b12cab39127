"""vLLM from 0.11 to 0.29 (eras 1 and 2): a tensor per place in a group, or one backing cut into blocks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from described import described
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.utils import set_kv_cache_layout
from vllm.v1.core import kv_cache_utils as planning
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup
from vllm_engine import bare_seconds, kernel_tokens

UNLIMITED = 1 << 60
"""Bytes of memory where the number of blocks is given."""


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
        order = [name for tensor in plan.kv_cache_tensors for name in tensor.shared_by]  # as the tensors are
        found = [part for name in order for part in parts_of(mine[name], group_of[name], views[name])]
        return {
            "blocks": plan.num_blocks,
            "groups": [list(group.layer_names) for group in plan.kv_cache_groups],
            **described(found),
        }

    @functools.cached_property
    def caches(self) -> Any:
        """What drives the cache manager; loaded when it is first asked for."""
        return importlib.import_module("vllm_cache").Caches(self)

    def prepared(self, request: dict[str, Any]) -> tuple[dict[str, Any], Any, list[dict[str, Any]]]:
        """Return the request, and what the engine is given for it: configuration, and specs by stage."""
        packed = request["order"].endswith("-packed")
        stages = [{entry["name"]: spec_of(entry) for entry in stage} for stage in request["stages"]]
        return request, configuration(request["blocks"], packed), stages

    def made(self, asked: tuple[dict[str, Any], Any, list[dict[str, Any]]]) -> tuple[Any, dict[str, Any]]:
        """Return the plan of the stage asked for, and its views."""
        request = asked[0]
        set_kv_cache_layout(request["order"].partition("-")[0])
        plan = self.planned(asked)
        runner = Runner(plan, torch.device(request.get("device", "meta")))
        raw = runner.call("_allocate_kv_cache_tensors", plan)
        tokens = kernel_tokens(plan, request)
        given = (plan, raw, tokens) if self.greeting["era"] == 1 else (raw, tokens)
        return plan, runner.call("_reshape_kv_cache_tensors", *given)

    def planned(self, asked: tuple[dict[str, Any], Any, list[dict[str, Any]]]) -> Any:
        """Return the plan of the stage asked for: of the given memory, or of exactly so many blocks."""
        request, config, stages = asked
        if request["bytes"] is not None:
            return planning.get_kv_cache_configs(config, stages, request["bytes"])[request["stage"]]
        merged = {name: spec for stage in stages for name, spec in stage.items()}
        groups = planning.get_kv_cache_groups(config, merged)
        mine = planning._project_kv_cache_groups_to_worker(groups, stages[request["stage"]])
        return planning.get_kv_cache_config_from_groups(config, mine, UNLIMITED)


class Runner:
    """As much of the engine's model runner as its methods for caches look at."""

    def __init__(self, plan: Any, device: Any) -> None:
        self.kv_cache_config, self.device = plan, device
        self.runner_only_attn_layers: set[str] = set()
        self.shared_kv_cache_layers: dict[str, str] = {}
        self.cache_config = SimpleNamespace(cache_dtype="auto")

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the engine's own method on this runner."""
        return getattr(GPUModelRunner, method)(self, *arguments)

    def __getattr__(self, name: str) -> Any:
        method = getattr(GPUModelRunner, name)
        return lambda *arguments: method(self, *arguments)

    def _kv_cache_spec_attn_group_iterator(self) -> Iterator[Any]:
        for number, group in enumerate(self.kv_cache_config.kv_cache_groups):
            specs: dict[Any, list[str]] = {}
            for name in group.layer_names:
                specs.setdefault(layer_spec(group, name), []).append(name)
            for spec, names in specs.items():
                latent = isinstance(spec, kinds.MLAAttentionSpec)
                yield AttentionGroup(MLACommonBackend if latent else FlashAttentionBackend, names, spec, number)


def layer_spec(group: Any, name: str) -> Any:
    """Return the engine's spec of one layer of a group."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, kinds.UniformTypeKVCacheSpecs) else spec


def parts_of(entry: dict[str, Any], group: int, view: Any) -> list[tuple[str, int, int, tuple[str, ...], Any]]:
    """Return the parts of a layer's view: its states, its rows, or K and V as the backend's kernels take them."""
    name = entry["name"]
    if entry["kind"] == "recurrent":
        return [(name, part, group, ("block", *entry["axes"][part]), state) for part, state in enumerate(view)]
    if entry["kind"] != "attention":
        return [(name, 0, group, ("block", "token", "dim"), view)]
    shape = FlashAttentionBackend.get_kv_cache_shape(7, 16, 1, 8)  # 7 blocks: the axis of two is another
    sides = view.unbind(shape.index(2))
    return [(name, part, group, ("block", "token", "head", "dim"), side) for part, side in enumerate(sides)]


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
    if entry["kind"] in ("latent", "index"):
        # the latent layers of the engine name the configured format, its indexer none, and so they are never merged
        return kinds.MLAAttentionSpec(**common, cache_dtype_str="auto" if entry["kind"] == "latent" else None)
    if entry["window"] is not None:
        return kinds.SlidingWindowSpec(**common, sliding_window=entry["window"])
    return kinds.FullAttentionSpec(**common)


def configuration(blocks: int | None, packed: bool) -> Any:
    """Return the part of vLLM's configuration that the planner reads."""
    extra = {"enable_cross_layers_blocks": "True"} if packed else {}
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=0, max_num_batched_tokens=1
        ),
        cache_config=SimpleNamespace(num_gpu_blocks_override=blocks, mamba_cache_mode="none"),
        model_config=SimpleNamespace(max_model_len=1, original_max_model_len=1),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        speculative_config=None,
        max_in_flight_tokens=1,
    )
