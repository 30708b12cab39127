"""SGLang's allocators of token slots and its prefix cache, driven as its scheduler does, on the CPU.

Requests, request rows, allocators, the radix tree, and what allocates, publishes, retracts and releases are the
engine's; only the choice of who is in a step is made here. What is told after every operation is their own state: rows,
free pages, and the tree's slots, each with its position and the slot before it.
"""

from __future__ import annotations

import functools
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch, release_req
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_schedule
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_pools import windowed_pool

REQUESTS, LONGEST_TOKENS = 64, 1 << 10
"""Rows of the engine's table of slots by request, and their width in tokens."""


@functools.cache
def configured() -> Any:
    """Publish a configuration as the engine's own tests do: on the CPU, with an attention backend without Triton."""
    override = get_context().override_server_args(device="cpu", attention_backend="torch_native")
    override.install()
    return override  # it restores what was before when it is collected


class Caches:
    """The one cache that is open, and its operations."""

    def __init__(self) -> None:
        self.cache: Cache | None = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do one operation, and return the state after it."""
        configured()
        if asked["cache"] == "open":
            self.cache = Cache(asked)
        cache = self.cache
        if cache is None or cache.id != asked["id"]:
            raise RuntimeError("the process was started anew, and its cache is gone")
        told = {} if asked["cache"] == "open" else getattr(cache, asked["cache"])(asked)
        return {**(told or {}), **cache.state()}


class Cache:
    """An allocator with its tree and its requests; two groups where layers have a window."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.id = asked["id"]
        self.tokens = asked["tokens"]
        self.size = asked["pages"] * self.tokens  # token slots, those of the sink not counted
        [manager] = asked["managers"][:1]  # a draft model's layers use the same slots
        self.window = asked["window"] and max(1, asked["window"] - 1)  # the engine does not count the token itself
        self.rows = ReqToTokenPool(REQUESTS, LONGEST_TOKENS, "cpu", False)
        common_arguments = {"dtype": torch.bfloat16, "device": "cpu", "need_sort": asked["sorted"]}
        if self.window:
            pool = windowed_pool(manager["full"], manager["window"], asked)
            self.allocator: Any = SWATokenToKVPoolAllocator(
                self.size, self.size, self.tokens, kvcache=pool, **common_arguments
            )
            self.parts: tuple[Any, ...] = (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
        else:
            kvcache = SimpleNamespace()
            self.allocator = (
                TokenToKVPoolAllocator(self.size, kvcache=kvcache, **common_arguments)
                if self.tokens == 1
                else PagedTokenToKVPoolAllocator(self.size, self.tokens, kvcache=kvcache, **common_arguments)
            )
            self.parts = (self.allocator,)
        self.components = (ComponentType.FULL, ComponentType.SWA)[: len(self.parts)]
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=not asked["caching"],
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.tokens,
                sliding_window_size=self.window or None,
                tree_components=self.components,
            )
        )
        self.requests: dict[int, Req] = {}
        self.running: list[int] = []
        self.targets: dict[int, int] = {}
        self.unpublished: set[int] = set()
        self.flight: list[list[tuple[Req, int]]] = []  # prompts that end in each step, and their retractions so far

    def admit(self, asked: dict[str, Any]) -> None:
        """Take a request in; it is given slots when a step first takes it up."""
        number = asked["request"]
        self.requests[number] = Req(
            f"{number}-{asked['unique']}",
            None,
            array("q", asked["tokens"]),
            SamplingParams(max_new_tokens=LONGEST_TOKENS),
            cache_salt=asked["salt"],
        )

    def extend(self, asked: dict[str, Any]) -> None:
        """Give a request more tokens, as sampling does."""
        self.requests[asked["request"]].output_ids.extend(asked["tokens"])

    def free(self, asked: dict[str, Any]) -> None:
        """End a request: its slots go to the tree where it has computed its prompt, and back where it has not."""
        number = asked["request"]
        request = self.requests.pop(number)
        if number not in self.running:
            return
        self.running.remove(number)
        begun = request.kv.kv_committed_len >= self.targets[number]
        self.unpublished.discard(number)
        request.finished_reason = FINISH_LENGTH(length=len(request.output_ids))
        common.release_kv_cache(request, self.tree, checkpoint=begun)

    def preempt(self, asked: dict[str, Any]) -> None:
        """Retract a request; it begins anew when a step takes it up again."""
        number = asked["request"]
        if number not in self.running:
            return
        self.running.remove(number)
        self.unpublished.discard(number)
        release_req(
            req=self.requests[number],
            remaing_req_count=len(self.running),
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=None,
        )

    def step(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Schedule a step: tokens of requests that decode, then prompts that go on, then prompts that begin."""
        for number in sorted(self.unpublished):
            common.checkpoint_kv_cache(self.requests[number], self.tree)
        self.unpublished.clear()
        decoding = [n for n in self.running if n in asked["requests"] and self.computed(n) >= self.targets[n]]
        preempted = self._make_room(decoding)
        if decoding:
            self._decode(decoding)
        taken = [{"request": n, "start": self.computed(n) - 1, "count": 1, "hit": 0} for n in decoding]
        prompts: list[tuple[int, int]] = []
        if not preempted:
            going_on = [n for n in self.running if n in asked["requests"] and self.computed(n) < self.targets[n]]
            for number in going_on + [n for n in asked["requests"] if n not in self.running]:
                hit = self._begin(number) if number not in self.running else 0
                if not self._fits(number, asked["chunk"], prompts):
                    self._back_out(number)
                    break
                prompts.append((number, hit))
        if prompts:
            with get_schedule().override(chunked_prefill_size=asked["chunk"] or -1):
                self._extend([number for number, _ in prompts])
        for number, hit in prompts:
            request = self.requests[number]
            if number not in self.running:
                self.running.append(number)
            if request.extend_end < self.targets[number]:
                self.unpublished.add(number)
            taken.append({"request": number, "start": request.prefix_len, "count": request.extend_len, "hit": hit})
        if taken:
            ended = [self.requests[number] for number, _ in prompts if number not in self.unpublished]
            self.flight.append([(request, request.retraction_count) for request in ended])
        return {"scheduled": taken, "preempted": preempted}

    def complete(self, asked: dict[str, Any]) -> None:
        """The oldest step is done: prompts that ended in it are published, as their results are looked at."""
        self.allocator.free_group_begin()
        for request, retractions in self.flight.pop(0):
            if not request.finished() and request.kv.holds_kv and request.retraction_count == retractions:
                common.checkpoint_kv_cache(request, self.tree)
        self.allocator.free_group_end()

    def computed(self, number: int) -> int:
        """Return the tokens of a request that have slots."""
        return int(self.requests[number].kv.kv_committed_len)

    def _make_room(self, decoding: list[int]) -> list[int]:
        preempted: list[int] = []
        while decoding and not self._batch(decoding).check_decode_mem():
            victim = self.running[-1]
            self.preempt({"request": victim})
            preempted.append(victim)
            if victim in decoding:
                decoding.remove(victim)
        return preempted

    def _begin(self, number: int) -> int:
        """Look for a cached prefix, and hold it; return its tokens."""
        request = self.requests[number]
        request.init_next_round_input(self.tree)
        request.lock = self.tree.lock(request.last_node)
        self.targets[number] = len(request.full_untruncated_fill_ids)
        return int(request.prefix_len)

    def _back_out(self, number: int) -> None:
        if number not in self.running:
            request = self.requests[number]
            self.tree.unlock(request.lock)
            request.lock = None
            request.kv.cache_protected_len = request.prefix_len = 0

    def _fits(self, number: int, chunk: int, others: list[tuple[int, int]]) -> bool:
        """Say what a step takes of a prompt, and whether what is free or may be evicted has room for it."""
        request = self.requests[number]
        waiting = self.targets[number] - request.prefix_len
        request.extend_end = request.prefix_len + (min(waiting, chunk) if chunk else waiting)
        pages = 0
        for one in (*(other for other, _ in others), number):
            asked = self.requests[one]
            pages += -(-asked.extend_end // self.tokens) - -(-asked.prefix_len // self.tokens)
        return all(pages * self.tokens <= available for available in self.room())

    def room(self) -> list[int]:
        """Return the tokens that are free or may be evicted, by group, as the engine counts them."""
        full, *window = self.parts
        found = [full.available_size() + self.tree.full_evictable_size()]
        return found + [part.available_size() + self.tree.swa_evictable_size() for part in window]

    def _batch(self, numbers: list[int]) -> ScheduleBatch:
        requests = [self.requests[number] for number in numbers]
        return ScheduleBatch(
            reqs=requests,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            device="cpu",
            enable_overlap=True,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )

    def _extend(self, numbers: list[int]) -> None:
        batch = self._batch(numbers)
        batch.forward_mode = ForwardMode.EXTEND
        batch.prefix_lens = [request.prefix_len for request in batch.reqs]
        batch.extend_lens = [request.extend_len for request in batch.reqs]
        batch.extend_num_tokens = sum(batch.extend_lens)
        batch.seq_lens = torch.tensor([request.extend_end for request in batch.reqs], dtype=torch.int64)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        allocation.alloc_for_extend(batch)
        for request in batch.reqs:
            request.extend_batch_idx += 1
            request.is_retracted = False

    def _decode(self, numbers: list[int]) -> None:
        batch = self._batch(numbers)
        batch.forward_mode = ForwardMode.DECODE
        batch.seq_lens = torch.tensor([self.computed(number) for number in numbers], dtype=torch.int64)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.req_pool_indices = torch.tensor([request.kv.req_pool_idx for request in batch.reqs], dtype=torch.int64)
        batch.req_pool_indices_cpu = batch.req_pool_indices.clone()
        allocation.alloc_for_decode(batch, token_per_req=1)
        for request in batch.reqs:
            request.decode_batch_idx += 1

    def state(self) -> dict[str, Any]:
        """Return rows, free pages and the tree, slots and pages as the engine numbers them."""
        windows = (None, self.window + 1)[: len(self.parts)] if self.window else (None,)
        rows = []
        for number in self.running:
            kv = self.requests[number].kv
            slots = self.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].to(torch.int64)
            rows.append([number, [self.of_group(group, slots) for group in range(len(self.parts))],
                         kv.cache_protected_len])  # fmt: skip
        return {
            "pages": self.size // self.tokens,
            "tokens": self.tokens,
            "groups": [{"kind": "paged", "tokens": self.tokens, "window": window} for window in windows],
            "rows": rows,
            "free": [part.get_all_free_pages().tolist() for part in self.parts],
            "available": [part.available_size() for part in self.parts],
            "evictable": [self.tree.full_evictable_size(), self.tree.swa_evictable_size()][: len(self.parts)],
            "held": [self.tree.full_protected_size(), self.tree.swa_protected_size()][: len(self.parts)],
            "tree": [self.cached(group) for group in range(len(self.parts))],
        }

    def of_group(self, group: int, slots: Any) -> list[int]:
        """Return the slots of a group that belong to slots of the first."""
        return list(slots.tolist() if group == 0 else self.allocator.full_to_swa_index_mapping[slots].tolist())

    def cached(self, group: int) -> list[list[int]]:
        """Return (slot, position, the first group's slot before it, whether a request holds it) of all in the tree."""
        walked = self.tree.tree_core.walk_for_kv_canary(False, group > 0)
        loose = set(self.tree.tree_core.walk_for_kv_canary(True, group > 0).slot_indices.tolist())
        slots = walked.slot_indices.tolist()
        mine = self.of_group(group, walked.slot_indices.to(torch.int64)) if slots else []
        found = zip(mine, walked.positions.tolist(), walked.prev_slot_indices.tolist(), slots, strict=True)
        return [[slot, position, before, int(full not in loose)] for slot, position, before, full in found]
