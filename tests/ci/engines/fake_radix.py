"""Slots of tokens and a tree of prefixes for tests that have no engine: two groups, one with a window, pages of two.

It answers what ``RadixEngineCache`` asks. ``FAULT`` names the one thing that it does wrong; the tests replace it. The
tree is a map from all tokens up to a page's end to that page.
"""

from __future__ import annotations

import os
from typing import Any

FAULT = ""
TOKENS = 2
WINDOWS = (None, 3)
PAGES = 10

Key = tuple[Any, ...]


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
        self.free_pages = [list(range(1, PAGES + 1)) for _ in WINDOWS]
        self.tree: dict[Key, dict[str, Any]] = {}
        self.flight: list[list[dict[str, Any]]] = []
        self.taken = 0

    def admit(self, asked: dict[str, Any]) -> None:
        """Take a request in."""
        self.requests[asked["request"]] = {"tokens": list(asked["tokens"]), "salt": asked["salt"], **self.blank()}

    @staticmethod
    def blank() -> dict[str, Any]:
        """Return what a request is before a step takes it up."""
        return {"computed": 0, "rows": [[] for _ in WINDOWS], "protected": 0, "target": 0}

    def extend(self, asked: dict[str, Any]) -> None:
        """Give a request more tokens."""
        self.requests[asked["request"]]["tokens"] += asked["tokens"]

    def complete(self, asked: dict[str, Any]) -> None:
        """A step is done, or the process is."""
        if FAULT == "ends":
            os._exit(3)
        for request in self.flight.pop(0):
            if request in [self.requests.get(number) for number in self.running]:
                self.publish(request)

    def free(self, asked: dict[str, Any]) -> None:
        """End a request; what it has computed stays in the tree."""
        request = self.requests[asked["request"]]
        if asked["request"] in self.running and request["computed"] >= request["target"]:
            self.publish(request)
        self.preempt(asked)
        del self.requests[asked["request"]]

    def preempt(self, asked: dict[str, Any]) -> None:
        """Take a request's own pages back, and let go of its prefix."""
        number = asked["request"]
        if number not in self.running:
            return
        self.running.remove(number)
        request = self.requests[number]
        for group, slots in enumerate(request["rows"]):
            own = slots[request["protected"] : -2 if FAULT == "leak" else None : TOKENS]
            self.free_pages[group] += [slot // TOKENS for slot in own if slot]
        if FAULT != "a prefix is held for ever":
            self.hold(request, request["protected"], -1)
        if FAULT == "the tree's pages are freed too":
            self.free_pages[0] += [slot // TOKENS for slot in request["rows"][0][: request["protected"] : TOKENS]]
        request.update(self.blank())

    def key(self, request: dict[str, Any], end: int) -> Key:
        """Return the key of the first ``end`` tokens."""
        return (None if FAULT == "a key without scope" else request["salt"], *request["tokens"][:end])

    def hold(self, request: dict[str, Any], tokens: int, change: int) -> None:
        """Hold the pages of a prefix, or let go of them."""
        for end in range(TOKENS, tokens + 1, TOKENS):
            self.tree[self.key(request, end)]["held"] += change

    def publish(self, request: dict[str, Any]) -> None:
        """Give what was computed to the tree, and read the tree's pages where it had them."""
        extra = 1 if FAULT == "a page is published too early" else 0
        end = min((request["computed"] + extra) // TOKENS * TOKENS, len(request["tokens"]) // TOKENS * TOKENS)
        rows, before = request["rows"], request["protected"]
        for last in range(before + TOKENS, end + 1, TOKENS):
            mine = [rows[group][last - TOKENS] // TOKENS if len(rows[group]) >= last - 1 else 0 for group in range(2)]
            held = self.tree.setdefault(self.key(request, last), {"pages": mine, "held": 0})
            for group, page in enumerate(held["pages"]):
                if page == mine[group]:
                    continue
                if page == 0:  # dropped by the request that published it: the tree takes this one
                    held["pages"][group] = mine[group]
                    continue
                if FAULT != "duplicates are lost" and mine[group]:
                    self.free_pages[group].append(mine[group])
                if FAULT != "duplicates are read":
                    rows[group][last - TOKENS : last] = [page * TOKENS, page * TOKENS + 1] if page else [0, 0]
        self.hold(request, before, -1)
        request["protected"] = max(before, end)
        if FAULT != "a prefix is not held" or end == before:
            self.hold(request, request["protected"], 1)

    def step(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Decode, with the last running request giving way, or else go on with prompts and begin others."""
        preempted: list[int] = []
        decoding = [n for n in self.running if n in asked["requests"] and self.left(n) <= 0]
        while decoding and not self.fits([(self.requests[n], 1) for n in decoding]):
            preempted.append(self.running[-1])
            decoding = [n for n in decoding if n != self.running[-1]]
            self.preempt({"request": self.running[-1]})
        parts = [(number, 0, 1) for number in decoding]
        going_on = [n for n in self.running if n in asked["requests"] and self.left(n) > 0]
        for number in [] if preempted else going_on + [n for n in asked["requests"] if n not in self.running]:
            hit = 0 if number in self.running else self.begin(number)
            left = self.left(number)
            count = min(left, asked["chunk"]) if asked["chunk"] else left
            if not self.fits([(self.requests[n], c) for n, _, c in (*parts, (number, 0, count))]):
                if number not in self.running:
                    self.hold(self.requests[number], hit, -1)
                    self.requests[number].update(self.blank())
                break
            parts.append((number, hit, count))
        taken = []
        for number, hit, count in parts:
            request = self.requests[number]
            taken.append({"request": number, "start": request["computed"], "count": count, "hit": hit})
            self.allocate(request, count)
            if number not in self.running:
                self.running.append(number)
        if taken:
            self.flight.append([self.requests[number] for number, _, _ in parts if self.left(number) <= 0])
        return {"scheduled": taken, "preempted": preempted}

    def left(self, number: int) -> int:
        """Return what is left of a prompt."""
        return int(self.requests[number]["target"] - self.requests[number]["computed"])

    def begin(self, number: int) -> int:
        """Look for the longest prefix in the tree and hold it; return its tokens."""
        request = self.requests[number]
        request["target"] = len(request["tokens"])
        hit = 0
        last = len(request["tokens"]) - (0 if FAULT == "a hit on all tokens" else 1)
        while hit + TOKENS <= last and (found := self.tree.get(self.key(request, hit + TOKENS))):
            if found["pages"][1] == 0:
                break  # its window has gone
            hit += TOKENS
            for group, page in enumerate(found["pages"]):
                request["rows"][group] += [page * TOKENS, page * TOKENS + 1]
        request["computed"] = request["protected"] = hit
        self.hold(request, hit, 1)
        return hit

    def leaves(self) -> list[Key]:
        """Return the pages that may be evicted now, the last ones of their prefixes."""
        inner = {key[: len(key) - TOKENS] for key in self.tree}
        anyway = FAULT == "what is held is evicted"
        return [key for key, held in self.tree.items() if key not in inner and (anyway or not held["held"])]

    def loose(self, group: int) -> int:
        """Return the pages that may be evicted in the end."""
        return sum(bool(held["pages"][group]) for held in self.tree.values() if not held["held"])

    def fits(self, parts: list[tuple[dict[str, Any], int]]) -> bool:
        """Say whether pages are there, or may be evicted, for so many tokens of each request."""
        needed = sum(-(-(one["computed"] + count) // TOKENS) - -(-one["computed"] // TOKENS) for one, count in parts)
        half = len(self.free_pages[0]) // 2 if FAULT == "half of the room is not given" else 0
        return all(needed <= len(free) + self.loose(group) - half for group, free in enumerate(self.free_pages))

    def allocate(self, request: dict[str, Any], count: int) -> None:
        """Give a request slots for ``count`` tokens, and drop what its window has left."""
        self.drop(request)
        for token in range(request["computed"], request["computed"] + count):
            for group, slots in enumerate(request["rows"]):
                if token % TOKENS:
                    slots.append(slots[-1] + (-1 if FAULT == "tokens are out of order" and token % 7 == 3 else 1))
                else:
                    slots.append(self.take(group) * TOKENS)
        request["computed"] += count

    def take(self, group: int) -> int:
        """Hand out a page, evicting where none is free."""
        while not self.free_pages[group]:
            for mine, page in enumerate(self.tree.pop(self.leaves()[0])["pages"]):
                self.free_pages[mine] += [page] if page else []
        self.taken += 1
        if FAULT == "page 0 is handed out" and self.taken % 5 == 0:
            return 0
        page = self.free_pages[group][0]
        if FAULT != "a page is handed out twice" or self.taken % 4:
            del self.free_pages[group][0]
        return page

    def drop(self, request: dict[str, Any]) -> None:
        """Drop the window's pages of a request's own that no token from now on attends to."""
        first = request["computed"] - 3 + (3 if FAULT == "a window is dropped too early" else 1)
        slots = request["rows"][1]
        for start in range(request["protected"], first // TOKENS * TOKENS, TOKENS):
            if slots[start]:
                self.free_pages[1].append(slots[start] // TOKENS)
                slots[start : start + TOKENS] = [0] * TOKENS

    def state(self) -> dict[str, Any]:
        """Return what slot allocators and a tree tell of themselves."""
        tree: list[list[list[int]]] = [[] for _ in WINDOWS]
        for key, held in self.tree.items():
            end = len(key) - 1
            before = self.tree.get(key[: len(key) - TOKENS])
            for group, page in enumerate(held["pages"]):
                last = -1 if before is None else before["pages"][0] * TOKENS + 1
                slots = [(page * TOKENS, last), (page * TOKENS + 1, held["pages"][0] * TOKENS)] if page else []
                tree[group] += [
                    [slot, end - TOKENS + place, ahead, int(held["held"] > 0)]
                    for place, (slot, ahead) in enumerate(slots)
                ]
        off = TOKENS if FAULT == "counts are off" and len(self.tree) > 2 else 0
        held_tokens = [sum(one[3] for one in part) for part in tree]
        return {
            "pages": PAGES,
            "tokens": TOKENS,
            "groups": [{"kind": "paged", "tokens": TOKENS, "window": window} for window in WINDOWS],
            "rows": [[n, self.requests[n]["rows"], self.requests[n]["protected"]] for n in self.running],
            "free": self.free_pages,
            "available": [len(free) * TOKENS for free in self.free_pages],
            "evictable": [len(part) - held + off for part, held in zip(tree, held_tokens, strict=True)],
            "held": held_tokens,
            "tree": tree,
        }


def load() -> Fake:
    """Return the engine."""
    return Fake()
