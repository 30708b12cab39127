"""What an engine's own cache manager tells of itself after each operation, and the shadow that checks it.

The shadow knows nothing of the engine's policy. It knows which tokens each request has, writes them block by block into
a memory of its own where the tables say, and asks that whatever a living request may still read is there. Groups of
layers overlay each other's bytes, so a block holds what the last group has written, and nothing of any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from ...model.arithmetic import div_up
from ...model.errors import SpecError
from ..cache.sequence import Contents
from ..finding import Finding, Where

_NONE: Final[Mapping[int, int]] = MappingProxyType({})
STATE: Final = -1
"""Where a recurrent state lies in a block: it has no tokens."""


class Group(msgspec.Struct, frozen=True):
    """A group of layers as the manager takes it: ``tokens`` of a block; ``window`` None for all tokens."""

    kind: str
    tokens: int
    window: int | None = None

    @property
    def recurrent(self) -> bool:
        """Whether a request has one state here, in its first block."""
        return self.kind == "recurrent"


class Part(msgspec.Struct, frozen=True):
    """What a step takes of one request: ``count`` tokens from ``start`` on; ``hit`` were found cached just before."""

    request: int
    start: int
    count: int
    hit: int


class State(msgspec.Struct, frozen=True):
    """The manager after one operation.

    ``tables`` are (request, block ids by group); ``references`` and ``free`` are by block and in the order of the
    queue; ``cached`` are (group, block, key); ``hashes`` are (request, the key after each ``hash_tokens`` tokens).
    """

    blocks: int
    groups: tuple[Group, ...]
    null: int
    tables: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
    references: tuple[int, ...]
    free_count: int
    free: tuple[int, ...]
    cached: tuple[tuple[int, int, str], ...]
    hashes: tuple[tuple[int, tuple[str, ...]], ...]
    hash_tokens: int
    scheduled: tuple[Part, ...] = ()
    preempted: tuple[int, ...] = ()


def read_state(answer: object, engine: str) -> State:
    """Return a manager's state; raise ``SpecError`` for an answer that makes no sense."""
    try:
        state = msgspec.convert(answer, State)
    except msgspec.ValidationError as error:
        raise SpecError("engine", f"{engine} answered what is no state of a cache: {error}") from None
    ids = [block for _, rows in state.tables for row in rows for block in row]
    ids += [*state.free, state.null, *(block for _, block, _ in state.cached)]
    if len(state.references) != state.blocks or any(not 0 <= block < state.blocks for block in ids):
        raise SpecError("engine", f"{engine} answered blocks that are not among its {state.blocks}")
    if any(len(rows) != len(state.groups) for _, rows in state.tables):
        raise SpecError("engine", f"{engine} answered a table without a row for each of its {len(state.groups)} groups")
    return state


class Request(msgspec.Struct):
    """One request: the number of the prefix up to each of its tokens, and how many have been computed."""

    contents: list[int]
    text: int
    computed: int = 0
    suspended: bool = False
    running: bool = False


class BlockShadow:
    """Who wrote what into which block, and the findings so far: the first of every rule."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.contents = Contents()
        self.findings: list[Finding] = []
        self.broken: set[str] = set()
        self.memory: dict[int, tuple[int, dict[int, int]]] = {}
        self._keys: dict[str, tuple[int, list[int]]] = {}
        self._key_of: dict[int, str] = {}

    def report(
        self, rule: str, message: str, remedy: str, *, group: int | None = None, block: int | None = None
    ) -> None:
        """Keep the first finding of every rule: what follows a broken one is mostly its consequence."""
        if rule not in self.broken:
            self.broken.add(rule)
            place = (Where(group=group, slot=block),)
            self.findings.append(Finding(rule=rule, message=f"{self.engine}: {message}", remedy=remedy, where=place))

    def step(self, state: State, requests: dict[int, Request]) -> None:
        """Write what a step computes, and check what it leaves behind.

        Each kernel writes the tokens of all requests before it reads, and steps follow each other on one stream.
        """
        tables = dict(state.tables)
        for part in state.scheduled:
            self._write(state, tables, part, requests)
        for part in state.scheduled:
            requests[part.request].computed = part.start + part.count
        self.check(state, requests, {part.request: part.start for part in state.scheduled})

    def check(self, state: State, requests: dict[int, Request], starts: Mapping[int, int] = _NONE) -> None:
        """Compare the manager's books with each other and with the shadow's, after any operation.

        ``starts`` are the first tokens that a step has computed, by request: its queries look back from there.
        """
        self._check_free(state)
        self._check_sharing(state, requests)
        self._check_keys(state, requests)
        for number, rows in state.tables:
            request = requests[number]
            start = starts.get(number, request.computed)
            for group, row in enumerate(rows) if request.running else ():
                self._read(state, number, request, group, row, start, request.computed)
        self._check_cached(state)

    def _write(
        self, state: State, tables: dict[int, tuple[tuple[int, ...], ...]], part: Part, requests: dict[int, Request]
    ) -> None:
        request, end = requests[part.request], part.start + part.count
        for index, group in enumerate(state.groups):
            row = tables[part.request][index]
            if group.recurrent:
                if self._there(state, part.request, index, row, 0):
                    self._check_alone(state, part.request, index, row[0], requests)
                    self.memory[row[0]] = index, {STATE: request.contents[end - 1]}
                continue
            for token in range(part.start, end):
                place, offset = divmod(token, group.tokens)
                if not self._there(state, part.request, index, row, place):
                    return
                block = row[place]
                if offset == 0 or token == part.start:
                    self._check_alone(state, part.request, index, block, requests, place)
                owner, held = self.memory.get(block, (index, {}))
                if owner != index:
                    held = {}
                held[offset] = request.contents[token]
                self.memory[block] = index, held

    def _there(self, state: State, request: int, group: int, row: tuple[int, ...], place: int) -> bool:
        """Whether the table has a block of the request's own at ``place`` for a write."""
        if place >= len(row):
            self.report(
                "capacity",
                f"request {request} has {len(row)} blocks in group {group}, and computes a token of block {place}",
                "give a request blocks for all tokens of a step before it is scheduled",
                group=group,
            )
            return False
        if row[place] == state.null:
            self.report(
                "sentinel",
                f"request {request} computes a token of its block {place} in group {group}, which is the null block",
                "give every token that is computed a block of its own",
                group=group,
                block=state.null,
            )
            return False
        return True

    def _check_alone(
        self, state: State, writer: int, group: int, block: int, requests: dict[int, Request], place: int = 0
    ) -> None:
        """Report a write into a block that another request's table names, and has computed itself."""
        for number, rows in state.tables:
            if number == writer:
                continue
            for other, row in enumerate(rows):
                tokens = state.groups[other].tokens
                if block in row and requests[number].computed > row.index(block) * tokens:
                    self.report(
                        "refcount",
                        f"request {writer} writes block {block} (its block {place} of group {group}), which request "
                        f"{number} reads in group {other}",
                        "write into blocks that one request holds alone, and copy a shared one first",
                        group=group,
                        block=block,
                    )
                    return

    def _read(
        self, state: State, number: int, request: Request, index: int, row: tuple[int, ...], start: int, end: int
    ) -> None:
        """Read what queries from ``start`` on attend to, of the ``end`` tokens computed."""
        group = state.groups[index]
        if group.recurrent:
            if (
                end
                and self._held(state, number, index, row, 0)
                and self._content(row[0], index, STATE) != (request.contents[end - 1])
            ):
                self._stale(number, index, row[0], f"the state after {end} tokens", STATE)
            return
        first = 0 if group.window is None else max(0, start - group.window + 1)
        for token in range(first, end):
            place, offset = divmod(token, group.tokens)
            if not self._held(state, number, index, row, place):
                return
            if self._content(row[place], index, offset) != request.contents[token]:
                self._stale(number, index, row[place], f"token {token}", offset)
                return

    def _held(self, state: State, number: int, group: int, row: tuple[int, ...], place: int) -> bool:
        if place < len(row) and row[place] != state.null:
            return True
        self.report(
            "window",
            f"request {number} still reads its block {place} of group {group}, and its table has "
            + ("no such block" if place >= len(row) else "the null block there"),
            "drop a block when no later token attends to it",
            group=group,
        )
        return False

    def _content(self, block: int, group: int, offset: int) -> int | None:
        owner, held = self.memory.get(block, (group, {}))
        return held.get(offset) if owner == group else None

    def _stale(self, number: int, group: int, block: int, what: str, offset: int) -> None:
        owner, held = self.memory.get(block, (group, {}))
        found = "what nobody has written"
        if owner != group:
            found = f"what group {owner} has written over it"
        elif offset in held:
            found = "a token of another text"
        self.report(
            "freshness",
            f"request {number} reads {what} in block {block} of group {group}, and finds {found}",
            "let a block be read only where what is read was written and is not written over",
            group=group,
            block=block,
        )

    def _check_free(self, state: State) -> None:
        named = [0] * state.blocks
        for _, rows in state.tables:
            for row in rows:
                for block in row:
                    named[block] += 1
        free = set(state.free)
        if len(free) != len(state.free) or state.free_count != len(state.free):
            self.report(
                "conservation",
                f"the free queue has {len(state.free)} blocks, {len(free)} different ones, and counts "
                f"{state.free_count}",
                "put a block into the free queue once, when its last holder drops it",
            )
            return
        for block, count in enumerate(named):
            problem = None
            if block == state.null:
                problem = "the null block is free" if block in free else None
            elif state.references[block] != count:
                problem = f"block {block} has {state.references[block]} references, and tables name it {count} times"
            elif (block in free) != (count == 0):
                problem = f"block {block} is {'' if block in free else 'not '}free, and tables name it {count} times"
            if problem is not None:
                self.report("conservation", problem, "keep every block either free or held", block=block)
                return

    def _check_sharing(self, state: State, requests: dict[int, Request]) -> None:
        holders: dict[int, list[tuple[int, int, int]]] = {}
        for number, rows in state.tables:
            for group, row in enumerate(rows):
                for place, block in enumerate(row):
                    if block != state.null:
                        holders.setdefault(block, []).append((number, group, place))
        for block, held in holders.items():
            for one, other in itertools.pairwise(held):
                if one[1] != other[1]:
                    self.report(
                        "namespace",
                        f"block {block} is held in groups {one[1]} and {other[1]}, which overlay the same bytes",
                        "draw the blocks of all groups from one free queue, and count each holder",
                        group=one[1],
                        block=block,
                    )
                elif not self._equal_prefix(state, requests, one, other):
                    self.report(
                        "refcount",
                        f"block {block} is block {one[2]} of request {one[0]} and block {other[2]} of request "
                        f"{other[0]} in group {one[1]}, whose tokens up to its end are not the same",
                        "share a block only where all tokens up to its end are equal and computed",
                        group=one[1],
                        block=block,
                    )

    @staticmethod
    def _equal_prefix(
        state: State, requests: dict[int, Request], one: tuple[int, int, int], other: tuple[int, int, int]
    ) -> bool:
        if one[0] == other[0] or one[2] != other[2] or state.groups[one[1]].recurrent:
            return False
        end = (one[2] + 1) * state.groups[one[1]].tokens
        mine, theirs = requests[one[0]], requests[other[0]]
        if min(mine.computed, theirs.computed) < end:
            return False
        return mine.contents[end - 1] == theirs.contents[end - 1]

    def _check_keys(self, state: State, requests: dict[int, Request]) -> None:
        """A key stands for one prefix, and a prefix has one key."""
        for number, hashes in state.hashes:
            contents = requests[number].contents
            for index, key in enumerate(hashes):
                end = (index + 1) * state.hash_tokens
                if end > len(contents):
                    self.report(
                        "cache-key",
                        f"request {number} has {len(contents)} tokens, and a key for {end}",
                        "make a key when all tokens that it stands for are there",
                    )
                    return
                content = contents[end - 1]
                known = self._keys.setdefault(key, (end, contents))
                if known[0] != end or known[1][end - 1] != content or self._key_of.setdefault(content, key) != key:
                    self.report(
                        "cache-key",
                        f"the key of the first {end} tokens of request {number} is that of other tokens, or those "
                        "tokens have another key",
                        "make keys of all tokens up to a block's end, of what else decides its bytes, and no more",
                    )
                    return

    def _check_cached(self, state: State) -> None:
        """What is cached holds what its key says."""
        for index, block, key in state.cached:
            known = self._keys.get(key)
            group = state.groups[index] if index < len(state.groups) else None
            if known is None or group is None or block == state.null:
                self.report(
                    "cache-key",
                    f"block {block} of group {index} is cached by a key that no request has had",
                    "cache a block by the key of its request's tokens",
                    group=index,
                    block=block,
                )
                return
            end, contents = known
            for offset in range(group.tokens):
                token = end - group.tokens + offset
                if token < 0 or self._content(block, index, offset) != contents[token]:
                    self.report(
                        "freshness",
                        f"block {block} of group {index} is cached as the end of {end} tokens, and does not hold token "
                        f"{token} of them",
                        "cache a block with the step that fills it, and withdraw its key when it is given away",
                        group=index,
                        block=block,
                    )
                    return


def null_blocks(state: State) -> Iterator[int]:
    """Yield the groups in which some request has dropped a block."""
    for _, rows in state.tables:
        for group, row in enumerate(rows):
            if state.null in row:
                yield group


def blocks_of(tokens: int, group: Group) -> int:
    """Return the blocks that ``tokens`` tokens take in a group at most."""
    return 1 if group.recurrent else div_up(tokens, group.tokens)
