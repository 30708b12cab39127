"""The SGLang that is installed: its own pools, built on torch's ``meta`` device, told in plain numbers.

Two things keep its import small and possible on a machine without a GPU: a bare package object, so that the front-end
API of its ``__init__`` stays out, and no fake operators for torchvision, whose native library may not be there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from described import described

Views = Iterator[tuple[str, int, int, tuple[str, ...], Any]]
"""Layer, which of its tensors, group, axes, tensor."""

HND = "SGLANG_USE_HND_KVCACHE"
"""What the engine reads when it makes a pool of heads before tokens."""
UNASKED_SLOTS = 1
"""Slots of speculative states where none are asked for; they have no tensors then."""


def load() -> Any:
    """Return what answers for the version that is installed."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    found = importlib.util.find_spec("sglang")
    if found is None or found.submodule_search_locations is None:
        raise SystemExit("sglang is not installed in this environment")
    package = types.ModuleType("sglang")
    package.__path__ = list(found.submodule_search_locations)
    package.__spec__ = found
    sys.modules["sglang"] = package
    register = torch.library.register_fake

    def register_fake(op: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *arguments, **options)

    torch.library.register_fake = register_fake
    torch.meta = types.ModuleType("torch.meta")
    from importlib.metadata import version

    return Pools(version("sglang"))


class Pools:
    """Builds the pools of a request with the engine's own classes, and says where their tensors lie."""

    def __init__(self, version: str) -> None:
        import torch
        from sglang.srt.mem_cache import memory_pool, swa_memory_pool

        self.torch, self.pools, self.windowed = torch, memory_pool, swa_memory_pool
        self.greeting = {"engine": "SGLang", "version": version}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the views of all pools that ``request`` names, or what another question asks for."""
        if "bare" in request:
            return {"bare": self.bare_seconds(request["bare"])}
        if "allocate" in request:
            return self.allocated(request["allocate"])
        if "unified" in request:
            return self.unified(request["unified"])
        found: dict[str, Any] = described(self.views(self.made(request)))
        return found

    def made(self, request: dict[str, Any]) -> list[tuple[dict[str, Any], Any]]:
        """Return the engine's pools in the order of ``request``, each with what it was asked for."""
        states = {asked["manager"]: self._states(asked) for asked in request["pools"] if asked["kind"] == "states"}
        made = []
        for asked in request["pools"]:
            os.environ[HND] = "1" if asked.get("hnd") else "0"
            beside = states.get(asked["manager"])
            if asked["kind"] == "states":
                made.append((asked, beside))
            elif asked["kind"] == "windowed":
                made.append((asked, self._windowed(asked)))
            elif asked["kind"] == "latent":
                made.append((asked, self._latent(asked)))
            else:
                made.append((asked, self._attention(asked, beside)))
        return made

    def bare_seconds(self, requests: list[dict[str, Any]]) -> float:
        """Return the seconds that building the pools of ``requests`` takes, with nothing told of them."""
        started = time.perf_counter()
        for request in requests:
            self.made(request)
        return time.perf_counter() - started

    def _type(self, name: str) -> Any:
        return getattr(self.torch, name)

    def _common(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {
            "page_size": asked["tokens"],
            "dtype": self._type(asked["dtype"]),
            "device": "meta",
            "enable_memory_saver": False,
        }

    def _class(self, asked: dict[str, Any]) -> Any:
        return self.pools.MHATokenToKVPoolFP4 if asked["fp4"] else self.pools.MHATokenToKVPool

    def _attention(self, asked: dict[str, Any], states: Any) -> Any:
        """Build the pool of full-attention layers; beside ``states``, within the pool of a hybrid model."""
        sizes = {"size": asked["size"], **self._common(asked), "head_num": asked["heads"], "head_dim": asked["dim"]}
        if states is not None and asked["dim"] == asked["value_dim"]:
            layers = asked["layers"]
            return self.pools.HybridLinearKVPool(
                **sizes, full_attention_layer_ids=layers, mamba_pool=states, full_kv_pool_class=self._class(asked)
            )
        return self._class(asked)(**sizes, v_head_dim=asked["value_dim"], layer_num=len(asked["layers"]))

    def _windowed(self, asked: dict[str, Any]) -> Any:
        """Build the two pools of a model with sliding windows."""
        return self.windowed.SWAKVPool(
            size=asked["size"], size_swa=asked["size"], **self._common(asked), head_num=asked["heads"],
            head_dim=asked["dim"], v_head_dim=asked["value_dim"], swa_head_num=asked["swa_heads"],
            swa_head_dim=asked["swa_dim"], swa_v_head_dim=asked["swa_value_dim"],
            swa_attention_layer_ids=asked["windows"], full_attention_layer_ids=asked["layers"],
            token_to_kv_pool_class=self._class(asked),
        )  # fmt: skip

    def _latent(self, asked: dict[str, Any]) -> Any:
        """Build a pool of latent rows, with index keys where they are asked for."""
        sizes = {
            "size": asked["size"], **self._common(asked), "kv_lora_rank": asked["rank"],
            "qk_rope_head_dim": asked["rope"], "layer_num": len(asked["layers"]),
        }  # fmt: skip
        if not asked["index"]:
            return self.pools.MLATokenToKVPool(**sizes)
        whole = {"index_buf_size": asked["size"]}  # otherwise it asks how a context is cut over ranks
        return self.pools.DSATokenToKVPool(
            **sizes, **whole, index_head_dim=128, kv_cache_dim=asked["rank"] + asked["rope"]
        )

    def _states(self, asked: dict[str, Any]) -> Any:
        """Build the pool of recurrent states."""
        shape = types.SimpleNamespace(
            conv=[tuple(asked["conv"])], temporal=tuple(asked["temporal"]), conv_kernel=asked["kernel"],
            disable_conv_window_dedup=False, num_k_heads_per_tp=1,
        )  # fmt: skip
        dtype = types.SimpleNamespace(conv=self._type(asked["conv_dtype"]), temporal=self._type(asked["dtype"]))
        return self.pools.MambaPool(
            size=asked["size"], spec_state_size=asked.get("spec_slots", UNASKED_SLOTS),
            cache_params=types.SimpleNamespace(shape=shape, dtype=dtype, is_kda=asked["kda"]),
            mamba_layer_ids=asked["layers"], device="meta", envelope_layout=asked["envelope"],
            speculative_num_draft_tokens=asked.get("draft_tokens"),
        )  # fmt: skip

    def views(self, made: list[tuple[dict[str, Any], Any]]) -> Views:
        """Yield the tensors of all pools; of two kinds in one pool the second has the next group."""
        for asked, pool in made:
            first = asked["group"]
            if asked["kind"] == "states":
                yield from self._state_views(asked, pool, first)
            elif asked["kind"] == "windowed":
                yield from self._paged_views(asked, asked["layers"], pool.full_kv_pool, first)
                yield from self._paged_views(asked, asked["windows"], pool.swa_kv_pool, first + 1)
            elif asked["kind"] == "latent":
                yield from self._latent_views(asked, pool, first)
            else:
                inner = getattr(pool, "full_kv_pool", pool)
                yield from self._paged_views(asked, asked["layers"], inner, first)

    def _paged_views(self, asked: dict[str, Any], layers: list[int], pool: Any, group: int) -> Views:
        axes = ("block", "head", "token", "dim") if asked.get("hnd") else ("row", "head", "dim")
        scaled = pool.k_scale_buffer is not None if layers else False
        for place, layer in enumerate(layers):
            yield f"{layer}", 0, group, axes, pool.k_buffer[place]
            yield f"{layer}", 1, group, axes, pool.v_buffer[place]
            if scaled:
                yield f"{layer}", 2, group, ("row", "content"), pool.k_scale_buffer[place]
                yield f"{layer}", 3, group, ("row", "content"), pool.v_scale_buffer[place]

    def _latent_views(self, asked: dict[str, Any], pool: Any, group: int) -> Views:
        for place, layer in enumerate(asked["layers"]):
            yield f"{layer}", 0, group, ("row", "head", "dim"), pool.kv_buffer[place]
            if asked["index"]:
                yield f"{layer}", 1, group, ("block", "content"), pool.index_k_with_scale_buffer[place]

    def _state_views(self, asked: dict[str, Any], pool: Any, group: int) -> Views:
        cache = pool.mamba_cache
        conv = ("block", "tap", "channel") if asked["kda"] else ("block", "channel", "tap")
        for part, axes, tensor in ((0, conv, cache.conv[0]), (1, ("block", "head", "dim", "state"), cache.temporal)):
            for place, layer in enumerate(asked["layers"]):
                yield f"{layer}", part, group, axes, tensor[place]
        if asked.get("draft_tokens") is not None:
            for place, layer in enumerate(asked["layers"]):
                window = ("block", "draft", *conv[1:])
                yield f"{layer}", 2, group + 1, window, cache.intermediate_conv_window[0][place]
            for place, layer in enumerate(asked["layers"]):
                temporal = ("block", "draft", "head", "dim", "state")
                yield f"{layer}", 3, group + 1, temporal, cache.intermediate_ssm[place]

    def allocated(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return what the paged allocator gives for each of ``needs`` tokens, and what is left."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        allocator = PagedTokenToKVPoolAllocator(
            asked["size"], asked["tokens"], dtype=self.torch.bfloat16, device="cpu", kvcache=None, need_sort=False
        )
        given = [allocator.alloc(need) for need in asked["needs"]]
        return {
            "given": [None if one is None else one.tolist() for one in given],
            "available": int(allocator.available_size()),
        }

    def unified(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the views of a pool with full attention at one end and states at the other."""
        from sglang.srt.mem_cache import unified_memory_pool as unified

        full = unified.MHASubPoolSpec(
            name="full", layer_num=asked["layers"], grow_direction="up", head_num=asked["heads"],
            head_dim=asked["dim"], store_dtype=self.torch.bfloat16,
        )  # fmt: skip
        states = unified.MambaSubPoolSpec(
            name="mamba", layer_num=asked["state_layers"], grow_direction="down",
            conv_state_shapes=(tuple(asked["conv"]),), conv_dtype=self._type(asked["conv_dtype"]),
            temporal_state_shape=tuple(asked["temporal"]), temporal_dtype=self._type(asked["dtype"]),
        )  # fmt: skip
        pool = unified.UnifiedKVPool(
            total_bytes=asked["bytes"], sub_pool_specs=[full, states], device="meta", enable_memory_saver=False
        )
        keys, values = pool.mha_views_for("full")
        conv, temporal = pool.mamba_views_for("mamba")
        views: list[tuple[str, int, int, tuple[str, ...], Any]] = []
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            views += [(f"{layer}", part, 0, ("row", "head", "dim"), one) for part, one in ((0, key), (1, value))]
        for layer in range(asked["state_layers"]):
            views.append((f"{asked['layers'] + layer}", 0, 1, ("block", "channel", "tap"), conv[0][layer]))
            views.append((f"{asked['layers'] + layer}", 1, 1, ("block", "head", "dim", "state"), temporal[layer]))
        names = ("full", "mamba")
        return {
            "entries": [full.entry_bytes(), states.entry_bytes()],
            "slots": [pool.max_slots(name) for name in names],
            "first": [pool.min_slot_index(name) for name in names],
            **described(views),
        }
