"""A cache manager for tests that have no engine: two groups of layers, one with a window, blocks of two tokens.

It answers what ``EngineCache`` asks. ``FAULT`` names the one thing that it does wrong; the tests replace it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

FAULT = ""
TOKENS = 2
WINDOWS = (None, 3)
BLOCKS = 13


class Fake:
    """The engine: sound, but for ``FAULT``."""

    def __init__(self) -> None:
        self.greeting = {"engine": "Fake", "version": "1.2", "era": 3}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do one operation and tell the state after it."""
        told = getattr(self, asked["cache"])(asked) or {}
        return {**told, **self.state()}

    def open(self, asked: dict[str, Any]) -> None:
        """Begin anew."""
        self.requests: dict[int, dict[str, Any]] = {}
        self.running: list[int] = []
        self.free_blocks = list(range(1, BLOCKS))
        self.references = [0] * BLOCKS
        self.cached: dict[tuple[int, str], int] = {}
        self.taken = 0

    def admit(self, asked: dict[str, Any]) -> None:
        """Take a request in."""
        self.requests[asked["request"]] = {
            "tokens": list(asked["tokens"]),
            "salt": asked["salt"],
            "computed": 0,
            "rows": [[] for _ in WINDOWS],
        }

    def extend(self, asked: dict[str, Any]) -> None:
        """Give a request more tokens."""
        self.requests[asked["request"]]["tokens"] += asked["tokens"]

    def complete(self, asked: dict[str, Any]) -> None:
        """A step is done, or the process is."""
        if FAULT == "ends":
            os._exit(3)

    def free(self, asked: dict[str, Any]) -> None:
        """End a request."""
        self.preempt(asked)
        del self.requests[asked["request"]]

    def preempt(self, asked: dict[str, Any]) -> None:
        """Take a request's blocks back."""
        number = asked["request"]
        request = self.requests[number]
        if number in self.running:
            self.running.remove(number)
        for row in request["rows"]:
            self.give_back(row[:-1] if FAULT == "leak" else row)
        request["computed"] = 0
        if FAULT != "preempt keeps the table" or number not in self.requests:
            request["rows"] = [[] for _ in WINDOWS]

    def step(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Schedule running requests, then others; the last running one gives way."""
        taken: dict[int, dict[str, int]] = {}
        preempted: list[int] = []
        for number in [number for number in self.running if number in asked["requests"]]:
            request = self.requests[number]
            count = self.count(request, request["computed"], asked["chunk"])
            while number in self.running and count:
                if self.allocate(request, request["computed"], count):
                    taken[number] = {"request": number, "start": request["computed"], "count": count, "hit": 0}
                    break
                preempted.append(self.running[-1])
                taken.pop(self.running[-1], None)
                self.preempt({"request": self.running[-1]})
        for number in [] if preempted else asked["requests"]:
            request = self.requests[number]
            if number in self.running:
                continue
            hit, rows = self.longest_hit(request)
            count = self.count(request, hit, asked["chunk"])
            if not self.allocate(request, hit, count, rows):
                break
            self.running.append(number)
            taken[number] = {"request": number, "start": hit, "count": count, "hit": hit}
        for number, part in taken.items():
            self.requests[number]["computed"] = part["start"] + part["count"]
        return {"scheduled": list(taken.values()), "preempted": preempted}

    def count(self, request: dict[str, Any], computed: int, chunk: int) -> int:
        """Return the tokens that a step takes."""
        waiting = len(request["tokens"]) - computed
        return min(waiting, chunk) if chunk else waiting

    def keys(self, request: dict[str, Any]) -> list[str]:
        """Return the key after each two tokens."""
        found = []
        for end in range(TOKENS, len(request["tokens"]) + 1, TOKENS):
            start = end - TOKENS if FAULT == "a key of the block alone" else 0
            salt = None if FAULT == "a key without scope" else request["salt"]
            found.append(hashlib.sha256(repr((salt, request["tokens"][start:end])).encode()).hexdigest())
        return found

    def longest_hit(self, request: dict[str, Any]) -> tuple[int, list[list[int]]]:
        """Return the tokens that are cached, all but the last at most, and their blocks."""
        last = len(request["tokens"]) - (0 if FAULT == "a hit on all tokens" else 1)
        best: tuple[int, list[list[int]]] = 0, [[] for _ in WINDOWS]
        rows: list[list[int]] = [[] for _ in WINDOWS]
        for place, key in enumerate(self.keys(request)):
            end = (place + 1) * TOKENS
            if end > last or any((group, key) not in self.cached for group in range(len(WINDOWS))):
                break
            for group, row in enumerate(rows):
                row.append(self.cached[group, key])
            best = end, [list(row) for row in rows]
        if FAULT == "a shared block is written" and best[0] and best[0] % (2 * TOKENS) == 0:
            return best[0] - 1, best[1]
        return best

    def allocate(self, request: dict[str, Any], start: int, count: int, hits: list[list[int]] | None = None) -> bool:
        """Give a request blocks for ``count`` tokens from ``start`` on; change nothing where there is no room."""
        needed = -(-(start + count) // TOKENS) - (1 if FAULT == "a table too short" and start + count > 4 else 0)
        rows = [list(row) for row in (hits if hits is not None else request["rows"])]
        fresh = sum(max(0, needed - len(row)) for row in rows)
        evictable = {block for row in hits or [] for block in row if not self.references[block]}
        half = len(self.free_blocks) // 2 if FAULT == "half of the room is not given" else 0
        if fresh > len(self.free_blocks) - len(evictable) - half:
            return False
        for block in [block for row in hits or [] for block in row]:
            self.references[block] += 1
            if block in self.free_blocks:
                self.free_blocks.remove(block)
        for group, row in enumerate(rows):
            while len(row) < needed:
                shared = FAULT == "groups share blocks" and group and len(row) < len(rows[0])
                row.append(rows[0][len(row)] if shared else self.take(row))
                self.references[row[-1]] += bool(shared)
            self.drop(group, row, start)
        request["rows"] = rows
        keys = self.keys(request)
        full = (start + count) // TOKENS + (1 if FAULT == "a block is cached too early" else 0)
        for group, row in enumerate(rows):
            for place in range(min(full, len(keys), len(row))):
                if row[place]:
                    self.cached.setdefault((group, keys[place]), row[place])
        return True

    def take(self, row: list[int]) -> int:
        """Hand out a block, whose key is withdrawn."""
        self.taken += 1
        if FAULT == "the null block is handed out" and self.taken % 5 == 0:
            return 0
        block = self.free_blocks[0]
        if FAULT != "a block is handed out twice" or self.taken % 4:
            del self.free_blocks[0]
        self.references[block] += 1
        if FAULT != "a key outlives its block":
            self.cached = {key: held for key, held in self.cached.items() if held != block}
        return block

    def drop(self, group: int, row: list[int], computed: int) -> None:
        """Drop the blocks that no token from ``computed`` on attends to."""
        window = WINDOWS[group]
        if window is None:
            return
        first = computed - window + (2 if FAULT == "a window is dropped too early" else 1)
        for place in range(max(0, first) // TOKENS):
            if row[place]:
                self.give_back([row[place]])
                row[place] = 0

    def give_back(self, row: list[int]) -> None:
        """Take blocks back, those of the end first."""
        for block in reversed(row):
            if not block:
                continue
            self.references[block] -= 1
            if self.references[block] == 0 or (FAULT == "a shared block is freed" and block not in self.free_blocks):
                self.free_blocks.append(block)

    def state(self) -> dict[str, Any]:
        """Return what a manager tells of itself."""
        return {
            "blocks": BLOCKS,
            "groups": [{"kind": "paged", "tokens": TOKENS, "window": window} for window in WINDOWS],
            "null": 0,
            "tables": [[number, request["rows"]] for number, request in self.requests.items()],
            "references": self.references,
            "free_count": len(self.free_blocks),
            "free": self.free_blocks,
            "cached": [[group, block, key] for (group, key), block in self.cached.items()],
            "hashes": [[number, self.keys(request)] for number, request in self.requests.items()],
            "hash_tokens": TOKENS,
        }


def load() -> Fake:
    """Return the engine."""
    return Fake()
