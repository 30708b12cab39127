"""The pools of SGLang 0.5 by what a request describes; importable once ``sglang_engine`` made the package so."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs import mamba_utils
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool, swa_memory_pool, unified_memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel

ROWS, PAGES = ("row", "head", "dim"), ("page", "head", "token", "dim")
SLOT = ("slot",)
TAPS_LAST, TAPS_FIRST = ("channel", "tap"), ("tap", "channel")
TEMPORAL = ("head", "dim", "state")
COMMON = {"device": "meta", "enable_memory_saver": False}


class Group:
    """Layers whose slots have ids of their own: ``views`` yields (layer, part, axes, tensor)."""

    def __init__(self, name: str, layers: list[int], views: Any, reported: dict[str, int]) -> None:
        self.name = name
        self.reported = reported
        self._layers = layers
        self._views = views

    def views(self) -> Iterator[tuple[str, int, tuple[str, ...], Any]]:
        """Yield the views layer by layer, or part by part where a part is one tensor of all layers."""
        for place, part, axes, tensor in self._views:
            yield f"{self.name}.{self._layers[place]}", part, axes, tensor


def made(request: dict[str, Any]) -> Iterator[Group]:
    """Yield the groups of a request, manager by manager: full attention, windows, states, draft tokens' states."""
    hnd = envs.SGLANG_USE_HND_KVCACHE.override(request["order"] == "HND")
    with hnd, get_parallel().override(attn_dcp_size=1):  # heads and states come already divided
        for manager in request["managers"]:
            if request.get("unified_bytes"):
                yield from unified(manager, request)
            else:
                yield from token_groups(manager, request)
                if manager["states"]:
                    yield from state_groups(manager, request)


def token_groups(manager: dict[str, Any], request: dict[str, Any]) -> Iterator[Group]:
    """Yield the groups of token pools, from the class that the engine takes for such a model."""
    full, window = manager["full"], manager["window"]
    if window:
        pool = windowed_pool(full, window, request)
        if full:
            yield group_of(f"{manager['name']}.full", pool.full_kv_pool, full, pool.layers_mapping)
        yield group_of(f"{manager['name']}.window", pool.swa_kv_pool, window, pool.layers_mapping)
    elif full:
        layers = full["layers"]
        if manager["states"] or layers != list(range(layers[0], layers[0] + len(layers))):
            hybrid = hybrid_pool(full, request)
            mapping = hybrid.full_attention_layer_id_mapping
            yield group_of(f"{manager['name']}.full", hybrid.full_kv_pool, full, mapping)
        else:
            yield group_of(f"{manager['name']}.full", plain_pool(full, request), full, None)


def size_of(request: dict[str, Any]) -> int:
    """Return the token slots that a pool is asked for, the sink not counted."""
    return int(request.get("size", request["pages"] * request["tokens"]))


def class_of(kind: str) -> Any:
    """Return the engine's class for one kind of layers."""
    return {
        "mha": memory_pool.MHATokenToKVPool,
        "fp4": memory_pool.MHATokenToKVPoolFP4,
        "mla": memory_pool.MLATokenToKVPool,
        "dsa": memory_pool.DSATokenToKVPool,
    }[kind]


def dtype_of(described: dict[str, Any]) -> Any:
    """Return the KV dtype as the engine is given it."""
    return getattr(torch, described["dtype"])


def geometry(described: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that say how a row of a pool's class looks."""
    common = {**COMMON, "page_size": request["tokens"]}
    if described["kind"] in ("mha", "fp4"):
        return common | {
            "head_num": described["heads"],
            "head_dim": described["dim"],
            "v_head_dim": described["value_dim"],
        }
    common |= {"kv_lora_rank": described["rank"], "qk_rope_head_dim": described["rope"]}
    if described["kind"] == "dsa":
        common |= {"index_head_dim": described["index_dim"], "kv_cache_dim": described["dim"]}
        common |= {"skip_topk_layers": [layer not in described["indexed"] for layer in described["layers"]]}
    return common


def plain_pool(full: dict[str, Any], request: dict[str, Any]) -> Any:
    """Return the pool of layers that all have pages, one after the other."""
    return class_of(full["kind"])(
        size=size_of(request), dtype=dtype_of(full), layer_num=len(full["layers"]), start_layer=full["layers"][0],
        **geometry(full, request),
    )  # fmt: skip


def windowed_pool(full: dict[str, Any] | None, window: dict[str, Any], request: dict[str, Any]) -> Any:
    """Return the two pools of a model with a sliding window; without full layers the first has none."""
    size = size_of(request)
    described = full or window
    same = described["kind"] in ("mha", "fp4")
    more: dict[str, Any] = {"full_kv_pool_class": class_of(described["kind"])}
    if same:
        more |= {"v_head_dim": described["value_dim"]}
        more |= {"swa_head_num": window["heads"], "swa_head_dim": window["dim"]}
        more |= {"swa_v_head_dim": window["value_dim"]}
    else:
        more |= {"full_kv_pool_kwargs": geometry(described, request)}
        more |= {"swa_kv_pool_kwargs": geometry(window, request)}
    return swa_memory_pool.SWAKVPool(
        size=size, size_swa=size, page_size=request["tokens"], dtype=dtype_of(described),
        head_num=described.get("heads", 1), head_dim=described["dim"], swa_attention_layer_ids=window["layers"],
        full_attention_layer_ids=full["layers"] if full else [], swa_kv_pool_class=class_of(window["kind"]),
        **COMMON, **more,
    )  # fmt: skip


def hybrid_pool(full: dict[str, Any], request: dict[str, Any]) -> Any:
    """Return the pool of a model of which some layers have pages; it takes no dim of V."""
    latent = full["kind"] in ("mla", "dsa")
    more: dict[str, Any] = {"full_kv_pool_class": class_of(full["kind"])}
    if latent:
        more = {"use_mla": True, "kv_lora_rank": full["rank"], "qk_rope_head_dim": full["rope"]}
    if full["kind"] == "dsa":
        more |= {"use_dsa": True, "index_head_dim": full["index_dim"], "kv_cache_dim": full["dim"]}
        more |= {"skip_topk_layers": [layer not in full["indexed"] for layer in full["layers"]]}
    return memory_pool.HybridLinearKVPool(
        size=size_of(request), dtype=dtype_of(full), page_size=request["tokens"], head_num=full.get("heads", 1),
        head_dim=full["dim"], full_attention_layer_ids=full["layers"], mamba_pool=None, **COMMON, **more,
    )  # fmt: skip


def group_of(name: str, pool: Any, described: dict[str, Any], mapping: Any) -> Group:
    """Return the group of one token pool; ``mapping`` is the pool's own map from a model's layer to a buffer."""
    layers = described["layers"]
    if mapping is None:
        places = [layer - pool.start_layer for layer in layers]
    else:
        places = [found[0] if isinstance(found := mapping[layer], tuple) else found for layer in layers]
    reported = pool.get_kv_size_bytes()
    sizes = reported if isinstance(reported, tuple) else (reported,)
    return Group(
        name, layers, list(token_views(pool, described, places)),
        {f"{name}.{part}": int(size) for part, size in zip(("key", "value"), sizes, strict=False)},
    )  # fmt: skip


def token_views(pool: Any, described: dict[str, Any], places: list[int]) -> Iterator[tuple[int, int, Any, Any]]:
    """Yield the views of a token pool layer by layer: K, V, their scales, or rows and index keys."""
    kind = described["kind"]
    for number, place in enumerate(places):
        if kind in ("mla", "dsa"):
            yield number, 0, ROWS, pool.kv_buffer[place]
            if kind == "dsa" and pool.index_k_with_scale_buffer[place].shape[0]:
                yield number, 1, ("page", "content"), pool.index_k_with_scale_buffer[place]
            continue
        axes = PAGES if pool.k_buffer[place].dim() == len(PAGES) else ROWS
        yield number, 0, axes, pool.k_buffer[place]
        yield number, 1, axes, pool.v_buffer[place]
        if kind == "fp4":
            yield number, 2, ("row", "content"), pool.k_scale_buffer[place]
            yield number, 3, ("row", "content"), pool.v_scale_buffer[place]


def state_shape(states: dict[str, Any]) -> Any:
    """Return the engine's own shapes of one layer's states on this rank."""
    ranks, inner = states["ranks"], states["heads"] * states["dim"]
    if states["algorithm"] == "mamba1":
        return mamba_utils.Mamba2StateShape.create_full_rank(
            tp_world_size=ranks, intermediate_size=inner, state_size=states["state"], conv_kernel=states["kernel"]
        )
    if states["algorithm"] == "kda":
        return mamba_utils.KimiLinearStateShape.create(
            tp_world_size=ranks, num_heads=states["heads"], head_dim=states["dim"], num_k_heads=states["groups"],
            head_k_dim=states["state"], conv_kernel_size=states["kernel"],
        )  # fmt: skip
    short = states["algorithm"] == "short_conv"  # as models of such layers describe themselves
    return mamba_utils.Mamba2StateShape.create(
        tp_world_size=ranks, intermediate_size=inner, n_groups=1 if short else states["groups"],
        num_heads=ranks if short else states["heads"], head_dim=inner if short else states["dim"],
        state_size=states["state"], conv_kernel=states["kernel"],
    )  # fmt: skip


def state_dtypes(states: dict[str, Any]) -> Any:
    """Return the dtypes of convolution and temporal state."""
    return mamba_utils.Mamba2StateDType(conv=getattr(torch, states["conv"]), temporal=getattr(torch, states["ssm"]))


def state_groups(manager: dict[str, Any], request: dict[str, Any]) -> Iterator[Group]:
    """Yield the states of requests, and those of draft tokens where there are any."""
    states = manager["states"]
    kda = states["algorithm"] == "kda"
    params = mamba_utils.KimiLinearCacheParams if kda else mamba_utils.Mamba2CacheParams
    drafts = request.get("draft_tokens")
    pool = memory_pool.MambaPool(
        size=request["state_slots"], spec_state_size=request["request_slots"],
        cache_params=params(shape=state_shape(states), dtype=state_dtypes(states), layers=states["layers"]),
        mamba_layer_ids=states["layers"], device=COMMON["device"], speculative_num_draft_tokens=drafts,
        envelope_layout=bool(request.get("envelope")),
    )  # fmt: skip
    cache = pool.mamba_cache
    numbers = range(len(states["layers"]))
    taps = TAPS_FIRST if kda else TAPS_LAST
    parts = [(0, (*SLOT, *taps), cache.conv[0]), (1, (*SLOT, *TEMPORAL), cache.temporal)]
    name = f"{manager['name']}.states"
    yield state_group(name, states["layers"], parts, numbers, {name: int(cache.mem_usage_bytes())})
    if drafts:
        windows, temporal = cache.intermediate_conv_window[0], cache.intermediate_ssm
        parts = [(0, (*SLOT, "draft", *taps), windows), (1, (*SLOT, "draft", *TEMPORAL), temporal)]
        yield state_group(f"{manager['name']}.drafts", states["layers"], parts, numbers, {})


def state_group(name: str, layers: list[int], parts: Any, numbers: Any, reported: dict[str, int]) -> Group:
    """Return a group whose tensors have the layer as their first axis; states of no element are left out."""
    views = [(place, part, axes, whole[place]) for part, axes, whole in parts for place in numbers if whole.numel()]
    return Group(name, layers, views, reported)


def unified(manager: dict[str, Any], request: dict[str, Any]) -> Iterator[Group]:
    """Yield the sub-pools of one buffer: tokens from its low end up, states from its high end down."""
    full, states = manager["full"], manager["states"]
    shape, dtypes = state_shape(states), state_dtypes(states)
    store = unified_memory_pool._store_dtype_for(dtype_of(full))
    common = {"layer_num": len(full["layers"]), "grow_direction": "up", "name": "full", "store_dtype": store}
    if full["kind"] == "mla":
        tokens = unified_memory_pool.MLASubPoolSpec(**common, kv_lora_rank=full["rank"], qk_rope_head_dim=full["rope"])
    else:
        tokens = unified_memory_pool.MHASubPoolSpec(
            **common, head_num=full["heads"], head_dim=full["dim"], v_head_dim=full["value_dim"],
            kv_cache_dtype=dtype_of(full),
        )  # fmt: skip
    mamba = unified_memory_pool.MambaSubPoolSpec(
        name="states", layer_num=len(states["layers"]), grow_direction="down",
        conv_state_shapes=tuple(tuple(one) for one in shape.conv), conv_dtype=dtypes.conv,
        temporal_state_shape=tuple(shape.temporal), temporal_dtype=dtypes.temporal,
    )  # fmt: skip
    buffer = unified_memory_pool.UnifiedKVPool(
        total_bytes=request["unified_bytes"], sub_pool_specs=[tokens, mamba], page_size=request["tokens"], **COMMON
    )
    said = {f"{name}.{what}": int(found(name)) for name in ("full", "states")
            for what, found in (("max_slots", buffer.max_slots), ("min_slot", buffer.min_slot_index))}  # fmt: skip
    said |= {"full.entry_bytes": tokens.entry_bytes(), "states.entry_bytes": mamba.entry_bytes()}
    name = f"{manager['name']}.full"
    if full["kind"] == "mla":
        rows = [(place, 0, ROWS, view) for place, view in enumerate(buffer.mla_views_for("full"))]
    else:
        keys, values = buffer.mha_views_for("full")
        pairs = enumerate(zip(keys, values, strict=True))
        rows = [(place, part, ROWS, view) for place, pair in pairs for part, view in enumerate(pair)]
    yield Group(name, full["layers"], rows, said)
    conv, temporal = buffer.mamba_views_for("states")
    taps = TAPS_FIRST if states["algorithm"] == "kda" else TAPS_LAST
    parts = [(0, (*SLOT, *taps), conv[0]), (1, (*SLOT, *TEMPORAL), temporal)]
    yield state_group(f"{manager['name']}.states", states["layers"], parts, range(len(states["layers"])), {})


def handed_out(request: dict[str, Any]) -> dict[str, Any]:
    """Return the slots that the paged allocator hands out for so many tokens, and what is left."""
    allocator = PagedTokenToKVPoolAllocator(
        request["size"], request["tokens"], dtype=torch.bfloat16, device="cpu",
        kvcache=SimpleNamespace(maybe_get_custom_mem_pool=lambda: None), need_sort=False,
    )  # fmt: skip
    slots = allocator.alloc(request["count"])
    return {"slots": None if slots is None else slots.tolist(), "available": allocator.available_size()}
