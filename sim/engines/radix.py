"""What SGLang's slot allocators and radix tree tell of themselves after each operation, and the shadow that checks it.

Rows are token slots, slot s lying in page ``s // tokens``; attention kernels read a row page by page. A page is free,
or the tree's, or belongs to one request alone; a request reads the tree's pages while it holds the nodes of its prefix.
Layers with a window have slots of their own behind a map from the first group's; what the window has left has none.
Pages of the groups are numbered one after the other here, page 0 of each, which nobody owns, being block 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from ...model.arithmetic import div_up
from ...model.errors import SpecError
from ..cache.sequence import root_of
from .lifecycle import BlockShadow, Group, Part, Request, State

NONE: Final = 0
"""The block of slots that nobody owns: padding is written there, and what a window has left points to it."""
_NOBODY: Final[Mapping[int, int]] = {}


class Cached(msgspec.Struct, frozen=True, array_like=True):
    """A slot of the tree: its token's position, the first group's slot before it (-1: none), whether it is held."""

    slot: int
    position: int
    before: int
    held: int


class RadixState(State, frozen=True, kw_only=True):
    """The allocators and the tree after one operation; ``by group`` where there is a list for each group.

    ``rows`` are (request, slots by group, tokens at the begin that are the tree's); ``free_pages`` are pages,
    ``available``, ``evictable`` and ``held_tokens`` the engine's own counts of tokens; ``tree`` are the tree's slots.
    """

    pages: int
    tokens: int
    rows: tuple[tuple[int, tuple[tuple[int, ...], ...], int], ...]
    free_pages: tuple[tuple[int, ...], ...]
    available: tuple[int, ...]
    evictable: tuple[int, ...]
    held_tokens: tuple[int, ...]
    tree: tuple[tuple[Cached, ...], ...]

    def block(self, group: int, slot: int) -> int:
        """Return the block of a slot."""
        page = slot // self.tokens  # floor: a page's slots follow each other
        return group * (self.pages + 1) + page if page > 0 else NONE

    def room(self, group: int) -> int:
        """Return the pages that are free or may be evicted, as the engine counts them."""
        return (self.available[group] + self.evictable[group]) // self.tokens  # floor: what is not a page is no room


class _Answer(msgspec.Struct, frozen=True):
    pages: int
    tokens: int
    groups: tuple[Group, ...]
    rows: tuple[tuple[int, tuple[tuple[int, ...], ...], int], ...]
    free: tuple[tuple[int, ...], ...]
    available: tuple[int, ...]
    evictable: tuple[int, ...]
    held: tuple[int, ...]
    tree: tuple[tuple[Cached, ...], ...]
    scheduled: tuple[Part, ...] = ()
    preempted: tuple[int, ...] = ()


def radix_state(state: State) -> RadixState:
    """Return ``state``, which is one of allocators and a tree; raise ``TypeError`` for that of another manager."""
    if not isinstance(state, RadixState):
        raise TypeError(f"a state of allocators and a tree is needed, found {type(state).__name__}")
    return state


def read_radix_state(answer: object, engine: str) -> RadixState:
    """Return the state of allocators and tree; raise ``SpecError`` for an answer that makes no sense."""
    try:
        told = msgspec.convert(answer, _Answer)
    except msgspec.ValidationError as error:
        raise SpecError("engine", f"{engine} answered what is no state of a prefix cache: {error}") from None
    count = len(told.groups)
    lists = (told.free, told.available, told.evictable, told.held, told.tree, *(row[1] for row in told.rows))
    if any(len(one) != count for one in lists):
        raise SpecError("engine", f"{engine} answered something without a part for each of its {count} groups")
    if told.tokens < 1:
        raise SpecError("engine", f"{engine} answered pages of {told.tokens} tokens")
    end = (told.pages + 1) * told.tokens
    slots = [slot for _, row, _ in told.rows for part in row for slot in part]
    slots += [cached.slot for part in told.tree for cached in part]
    if any(not 0 <= slot < end for slot in slots) or any(not 0 <= p <= told.pages for part in told.free for p in part):
        raise SpecError("engine", f"{engine} answered slots that are not in its {told.pages} pages")
    return _state_of(told)


def _state_of(told: _Answer) -> RadixState:
    """Return the state whose tables are the pages that kernels read: that of the first slot of every page of a row."""

    def block(group: int, page: int) -> int:
        return group * (told.pages + 1) + page if page else NONE

    def row_of(group: int, slots: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(block(group, slot // told.tokens) for slot in slots[:: told.tokens])  # floor: a slot's page

    free = tuple(block(group, page) for group, pages in enumerate(told.free) for page in pages)
    cached = {
        (group, block(group, one.slot // told.tokens))  # floor: a slot's page
        for group, part in enumerate(told.tree)
        for one in part
    }
    return RadixState(
        blocks=len(told.groups) * (told.pages + 1),
        groups=told.groups,
        null=NONE,
        tables=tuple(
            (number, tuple(row_of(group, slots) for group, slots in enumerate(row))) for number, row, _ in told.rows
        ),
        references=(),
        free_count=len(free),
        free=free,
        cached=tuple((group, place, str(place)) for group, place in sorted(cached)),
        hashes=(),
        hash_tokens=told.tokens,
        scheduled=told.scheduled,
        preempted=told.preempted,
        pages=told.pages,
        tokens=told.tokens,
        rows=told.rows,
        free_pages=told.free,
        available=told.available,
        evictable=told.evictable,
        held_tokens=told.held,
        tree=told.tree,
    )


class RadixShadow(BlockShadow):
    """The shadow of slot allocators with a radix tree."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self._before: dict[int, int] = {}

    def check(self, state: State, requests: dict[int, Request], starts: Mapping[int, int] = _NOBODY) -> None:
        """Compare rows, free pages and the tree with each other and with what was written."""
        state = radix_state(state)
        for request in requests.values():
            before = root_of(request.text)
            for content in request.contents:
                self._before.setdefault(content, before)
                before = content
        self._check_slots(state)
        self._check_owners(state)
        self._check_held(state)
        for group, part in enumerate(state.tree):
            self._check_tree(state, group, part)
        super().check(state, requests, starts)
        written = {block for part in state.scheduled for block in self._written(state, part)}
        for group, part in enumerate(state.tree):
            for one in part:
                if state.block(group, one.slot) in written:
                    self.report(
                        "refcount",
                        f"a step writes slot {one.slot} of group {group}, which is the tree's",
                        "publish a page when all of its tokens are computed, and give what follows a page of its own",
                        group=group,
                        block=state.block(group, one.slot),
                    )
                    return

    @staticmethod
    def _written(state: RadixState, part: Part) -> Iterator[int]:
        for number, row, _ in state.rows:
            if number == part.request:
                for group, slots in enumerate(row):
                    for slot in slots[part.start : part.start + part.count]:
                        yield state.block(group, slot)

    def _check_slots(self, state: RadixState) -> None:
        """Each token lies where kernels look for it: in the page of its page's first token, at its own offset."""
        for number, row, _ in state.rows:
            for group, slots in enumerate(row):
                for token, slot in enumerate(slots):
                    place = token % state.tokens
                    looked = slots[token - place] + place
                    if slot != looked and (slot or slots[token - place]):
                        self.report(
                            "freshness",
                            f"token {token} of request {number} is written to slot {slot} of group {group}, and looked "
                            f"for in slot {looked}",
                            "keep the tokens of a page in one page, in their order",
                            group=group,
                            block=state.block(group, slot),
                        )
                        return

    def _check_owners(self, state: RadixState) -> None:
        """Each page is free, or the tree's, or one request's own; the engine's counts say the same."""
        for group, free in enumerate(state.free_pages):
            owners: dict[int, list[str]] = {}
            for page in free:
                owners.setdefault(page, []).append("the free list")
            for page in {one.slot // state.tokens for one in state.tree[group]}:  # floor: a slot's page
                owners.setdefault(page, []).append("the tree")
            for number, row, protected in state.rows:
                for page in {slot // state.tokens for slot in row[group][protected:]} - {0}:  # floor: a slot's page
                    owners.setdefault(page, []).append(f"request {number}")
            for page in range(1, state.pages + 1):
                found = owners.pop(page, [])
                if len(found) != 1:
                    self._misowned(group, page, found, state)
                    return
            if owners:
                self.report(
                    "sentinel",
                    f"page 0 of group {group} is owned by {', '.join(owners[0])}",
                    "never hand out the page that padding is written to",
                    group=group,
                )
            if state.available[group] != len(free) * state.tokens:
                self.report(
                    "conservation",
                    f"group {group} has {len(free)} free pages of {state.tokens} tokens, and says that "
                    f"{state.available[group]} tokens are available",
                    "count what is free by its pages",
                    group=group,
                )

    def _misowned(self, group: int, page: int, found: list[str], state: RadixState) -> None:
        self.report(
            "conservation",
            f"page {page} of group {group} belongs to {' and '.join(found) or 'nobody'}",
            "keep every page in the free list, in the tree, or with one request",
            group=group,
            block=state.block(group, page * state.tokens),
        )

    def _check_held(self, state: RadixState) -> None:
        """A prefix that a request reads is held, and the engine's counts of what may be evicted say the same."""
        for group, part in enumerate(state.tree):
            held = sum(bool(one.held) for one in part)
            if (state.held_tokens[group], state.evictable[group]) != (held, len(part) - held):
                self.report(
                    "conservation",
                    f"the tree has {held} tokens of group {group} that requests hold and {len(part) - held} others, "
                    f"and counts {state.held_tokens[group]} and {state.evictable[group]}",
                    "count what may be evicted when a node is held, let go, split or removed",
                    group=group,
                )
                return
            if held and not state.rows:
                self.report(
                    "conservation",
                    f"no request has slots, and {held} tokens of group {group} in the tree are held",
                    "let go of a prefix when the request that held it ends",
                    group=group,
                )
        held_slots = {one.slot for one in state.tree[0] if one.held}
        for number, row, protected in state.rows:
            loose = [token for token, slot in enumerate(row[0][:protected]) if slot not in held_slots]
            if loose:
                self.report(
                    "refcount",
                    f"request {number} reads token {loose[0]} in slot {row[0][loose[0]]} of the tree, which may be "
                    "evicted",
                    "hold the nodes of a prefix for as long as a request reads it",
                    group=0,
                    block=state.block(0, row[0][loose[0]]),
                )
                return

    def _check_tree(self, state: RadixState, group: int, part: tuple[Cached, ...]) -> None:
        """Each slot of the tree holds a token that was computed after the one that the slot before it holds."""
        first = {one.slot: one.position for one in state.tree[0]}
        for one in part:
            content = self._content(state.block(group, one.slot), group, one.slot % state.tokens)
            before = None
            if content is not None:
                before = self._before.get(content)
            if one.position == 0:
                right = before is not None and before < 0
            else:
                right = (
                    before is not None
                    and first.get(one.before) == one.position - 1
                    and before == self._content(state.block(0, one.before), 0, one.before % state.tokens)
                )
            if not right:
                self.report(
                    "freshness",
                    f"slot {one.slot} of group {group} is cached as token {one.position} of a prefix, and holds "
                    + ("what nobody has written" if content is None else "a token of another one"),
                    "publish what was computed for the tokens of a node, and keep it until the node is removed",
                    group=group,
                    block=state.block(group, one.slot),
                )
                return

    def _check_free(self, state: State) -> None:
        """Pages have owners instead of references: ``_check_owners``."""

    def _check_keys(self, state: State, requests: dict[int, Request]) -> None:
        """The tree's keys are tokens: a wrong hit reads what was written for others."""

    def _check_cached(self, state: State) -> None:
        """Slots of the tree are checked one by one: ``_check_tree``."""


def pages_of(tokens: int, state: RadixState) -> int:
    """Return the pages that ``tokens`` tokens take."""
    return div_up(tokens, state.tokens)
