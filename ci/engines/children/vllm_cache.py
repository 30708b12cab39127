"""vLLM's cache manager, driven as its scheduler does: requests come, are given blocks, run out of them, and go.

What is told after every operation is the manager's own state: block tables, references, the free queue, what is cached.
"""

from __future__ import annotations

import inspect
import math
import os
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

KEY_BYTES = 32
LONGEST_TOKENS = 1 << 14
"""Tokens of the longest request, and of the block of a recurrent layer, which is one for each request then."""


class Caches:
    """The one cache that is open, and its operations; ``planner`` plans for it."""

    def __init__(self, planner: Any) -> None:
        self.planner = planner
        self.cache: Cache | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one operation, and return the state after it."""
        if request["cache"] == "open":
            for stage in request["stages"]:
                for entry in stage:
                    if entry["kind"] == "recurrent":
                        entry["block"] = LONGEST_TOKENS
            asked = self.planner.prepared(request)
            self.cache = Cache(
                request["id"],
                kv_cache_utils.generate_scheduler_kv_cache_config([self.planner.planned(asked)]),
                request["caching"],
            )
        cache = self.cache
        if cache is None or cache.id != request["id"]:
            raise RuntimeError("the process was started anew, and its cache is gone")
        told = {} if request["cache"] == "open" else getattr(cache, request["cache"])(request)
        return {**(told or {}), **cache.state()}


class Cache:
    """A manager with its requests. Steps advance the computed tokens when they are scheduled, as the scheduler does."""

    def __init__(self, number: int, plan: Any, caching: bool) -> None:
        self.id = number
        self.plan = plan
        blocks = [group.kv_cache_spec.block_size for group in plan.kv_cache_groups]
        self.hash_block = math.gcd(*blocks)
        given = {
            "kv_cache_config": plan,
            "max_model_len": LONGEST_TOKENS,
            "scheduler_block_size": math.lcm(*blocks),
            "hash_block_size": self.hash_block,
            "max_in_flight_tokens": LONGEST_TOKENS,
            "max_num_batched_tokens": LONGEST_TOKENS,
            "enable_caching": caching,
        }
        known = inspect.signature(KVCacheManager).parameters
        self.manager = KVCacheManager(**{name: value for name, value in given.items() if name in known})
        os.environ.setdefault("PYTHONHASHSEED", "0")  # the engine's seed of hashes: the same in every process
        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(self.hash_block, sha256)
        self.requests: dict[int, Request] = {}
        self.running: list[int] = []
        self.flight: list[list[tuple[Request, int]]] = []

    def admit(self, asked: dict[str, Any]) -> None:
        """Take a request in; it is given blocks when a step first takes it up."""
        number = asked["request"]
        self.requests[number] = Request(
            f"{number}-{asked['unique']}",
            list(asked["tokens"]),
            SamplingParams(max_tokens=LONGEST_TOKENS),
            None,
            cache_salt=asked["salt"],
            block_hasher=self.hasher,
        )

    def extend(self, asked: dict[str, Any]) -> None:
        """Give a request more tokens, as sampling does."""
        self.requests[asked["request"]].append_output_token_ids(list(asked["tokens"]))

    def free(self, asked: dict[str, Any]) -> None:
        """End a request."""
        number = asked["request"]
        self.manager.free(self.requests.pop(number))
        if number in self.running:
            self.running.remove(number)

    def preempt(self, asked: dict[str, Any]) -> None:
        """Take a request's blocks back; it begins anew when a step takes it up again."""
        number = asked["request"]
        if number in self.running:
            self.running.remove(number)
        request = self.requests[number]
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def step(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Schedule a step: running requests first, the last one preempted where there is no room, then others."""
        if hasattr(self.manager, "new_step_starts"):
            self.manager.new_step_starts()
        taken: dict[int, dict[str, int]] = {}
        preempted: list[int] = []
        for number in [number for number in self.running if number in asked["requests"]]:
            if number in self.running:
                self._run(number, asked["chunk"], taken, preempted)
        for number in [] if preempted else asked["requests"]:
            if number not in self.running and not self._start(number, asked["chunk"], taken):
                break
        for number, part in taken.items():
            self.requests[number].num_computed_tokens += part["count"]
            if hasattr(self.requests[number], "num_in_flight_tokens"):
                self.requests[number].num_in_flight_tokens += part["count"]
        if taken:
            self.flight.append([(self.requests[number], part["count"]) for number, part in taken.items()])
        return {"scheduled": list(taken.values()), "preempted": preempted}

    def complete(self, asked: dict[str, Any]) -> None:
        """The oldest step is done."""
        for request, count in self.flight.pop(0):
            if hasattr(request, "num_in_flight_tokens"):
                request.num_in_flight_tokens -= count

    def _run(self, number: int, chunk: int, taken: dict[int, dict[str, int]], preempted: list[int]) -> None:
        request = self.requests[number]
        count = tokens_of(request.num_tokens - request.num_computed_tokens, chunk)
        if count == 0:
            return
        while self.manager.allocate_slots(request, count) is None:
            victim = self.running[-1]
            self.preempt({"request": victim})
            taken.pop(victim, None)
            preempted.append(victim)
            if victim == number:
                return
        taken[number] = {"request": number, "start": request.num_computed_tokens, "count": count, "hit": 0}

    def _start(self, number: int, chunk: int, taken: dict[int, dict[str, int]]) -> bool:
        request = self.requests[number]
        blocks, hit = self.manager.get_computed_blocks(request)[:2]
        count = tokens_of(request.num_tokens - hit, chunk)
        if count == 0:
            return True
        if self.manager.allocate_slots(request, count, hit, blocks) is None:
            return False
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit
        self.running.append(number)
        taken[number] = {"request": number, "start": hit, "count": count, "hit": hit}
        return True

    def state(self) -> dict[str, Any]:
        """Return tables, references, the free queue, and the hashes of what is cached and of the requests."""
        pool = self.manager.block_pool
        coordinator = self.manager.coordinator
        cached = []
        for block in pool.blocks:
            key = block.block_hash
            if key is not None:
                group = kv_cache_utils.get_group_id(key)
                # before 0.25 a larger block's key is those of its parts in a row; the last stands for all tokens
                cached.append([group, block.block_id, kv_cache_utils.get_block_hash(key)[-KEY_BYTES:].hex()])
        return {
            "blocks": pool.num_gpu_blocks,
            "groups": [group_of(group.kv_cache_spec) for group in self.plan.kv_cache_groups],
            "null": pool.null_block.block_id,
            "tables": [
                [number, [[block.block_id for block in row] for row in coordinator.get_blocks(request.request_id)]]
                for number, request in self.requests.items()
            ],
            "references": [block.ref_cnt for block in pool.blocks],
            "free_count": pool.get_num_free_blocks(),
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "cached": cached,
            "hashes": [
                [number, [key.hex() for key in request.block_hashes]] for number, request in self.requests.items()
            ],
            "hash_tokens": self.hash_block,
        }


def tokens_of(waiting: int, chunk: int) -> int:
    """Return how many tokens a step takes: all that wait, or at most ``chunk``."""
    return min(waiting, chunk) if chunk else waiting


def group_of(spec: Any) -> dict[str, Any]:
    """Return what kind of group the manager takes this one for."""
    recurrent = hasattr(spec, "shapes")
    return {
        "kind": "recurrent" if recurrent else "paged",
        "tokens": spec.block_size,
        "window": getattr(spec, "sliding_window", None),
    }
