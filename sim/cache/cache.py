"""``RunningCache``: sequences that come, grow, share, shrink and go over the slots of a layout.

One class serves both TensorRT-LLM managers, which differ in a few rules (``managers``). What a published fault changes
is a method of its own here, so that a faulty cache (``faulty``) overrides exactly that. Every operation is all or
nothing: it raises ``Refused`` before it changes anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import msgspec

from ...model.arithmetic import div_up
from . import beams, steps, tiers
from .geometry import CycleGeometry, Geometry
from .ledger import Ledger
from .pages import Page, SlotPool
from .refusal import Refused
from .sequence import Contents, Sequence
from .shadow import Shadow
from .steps import Step, Table
from .trace import Operation
from .tree import Node, Tree

TABLE_BLOCKS = 64
"""Blocks of a row of the page table."""


class Rules(msgspec.Struct, frozen=True):
    """What tells one manager from another.

    ``recycle_first``: freed slots go before ones that were never used. ``swaps_memory``: an offloaded block swaps
    memory with one of the host's and keeps its id. ``stores_on_free``: full blocks are published when a request ends.
    """

    name: str
    recycle_first: bool
    swaps_memory: bool
    stores_on_free: bool
    suspends: bool


class Hit(msgspec.Struct, frozen=True):
    """A prefix that was found: full blocks, and ``partial_tokens`` of the block ``partial``."""

    nodes: tuple[Node, ...]
    partial: Node | None = None
    partial_tokens: int = 0


class RunningCache:
    """The cache of one rank while it runs; ``apply`` is all that a trace needs."""

    def __init__(self, geometry: Geometry, rules: Rules, *, record: bool = False) -> None:
        self.geometry = geometry
        self.rules = rules
        self.block_tokens = geometry.tokens_per_block
        self.shadow = Shadow(geometry, record=record)
        self.ledger = Ledger(geometry, self.shadow)
        self.pools = [SlotPool(group.slots, recycle_first=rules.recycle_first) for group in geometry.groups]
        self.paged = tuple([cycle for cycle in geometry.cycles if not cycle.recurrent])
        self.recurrent = tuple([cycle for cycle in geometry.cycles if cycle.recurrent])
        self.sequences: dict[int, Sequence] = {}
        self.contents = Contents()
        self.tree = Tree()
        self.flight: list[Step] = []
        self.step_count = 0
        self.dummies: dict[int, Page] = {}
        self.table: Table = {}
        self.seen: set[str] = set()

    def apply(self, number: int, operation: Operation) -> Refused | None:
        """Do one operation; return the refusal, None when it was done."""
        self.shadow.operation = number
        owned, holds = self.ledger.owned.copy(), self.ledger.holds
        refusal = None
        try:
            self._do(operation)
        except Refused as refused:
            refusal = refused
            self.ledger.check_refusal(owned, holds, refused.message)
        self.ledger.balance([pool.free_count for pool in self.pools])
        return refusal

    def _do(self, operation: Operation) -> None:
        kind, a, b = operation.kind, operation.a, operation.b
        if kind == "step":
            steps.dispatch(self, a, b, operation.c)
        elif kind == "complete":
            steps.complete_oldest(self)
        elif kind == "admit":
            self.admit(a, b, operation.c)
        elif kind == "offload":
            tiers.offload(self, a + 1)
        elif kind == "onload":
            tiers.onload(self, a + 1)
        else:
            self._do_with(kind, self.sequence(a), b)

    def _do_with(self, kind: str, sequence: Sequence, b: int) -> None:
        if kind == "free":
            self.free(sequence)
        elif kind == "resume":
            tiers.resume(self, sequence)
        elif kind == "suspend":
            tiers.suspend(self, sequence)
        elif sequence.suspended:
            raise Refused("suspended", f"request {sequence.request} is suspended: resume it first")
        elif kind == "extend":
            self.extend(sequence, b)
        elif kind == "rewind":
            self.rewind(sequence, b)
        elif kind == "commit":
            self.commit(sequence)
        elif kind == "fork":
            beams.fork(self, sequence, b)
        else:
            beams.reorder(self, sequence, b)

    def sequence(self, request: int) -> Sequence:
        """Return a request's sequence; raise ``Refused`` where there is none."""
        found = self.sequences.get(request)
        if found is None:
            raise Refused("unknown-request", f"request {request} is not there: admit it first")
        return found

    # What a faulty cache may change ----------------------------------------------------------------------------------

    def block_key(self, sequence_text: int, contents: list[int], end: int) -> Hashable:
        """Return the key under which the block that ends before token ``end`` is published."""
        return contents[end - 1]

    def ready_step(self, page: Page) -> int:
        """Return the step that must be completed before the slot of ``page`` is used again."""
        return page.last_step

    def freed_slot(self, page: Page) -> int:
        """Return the slot that is given back when ``page`` is freed."""
        return page.slot

    def stale_end(self, cycle: CycleGeometry, history: int) -> int:
        """Return the block before which a window of ``cycle`` has passed, at ``history`` accepted tokens."""
        if cycle.window is None:
            return 0
        return max(0, (history + 1 - cycle.window) // self.block_tokens)  # floor: only whole blocks go stale

    def committable(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence may be published: accepted, and written."""
        return min(sequence.done, sequence.history)

    def clear_ranges(self, cycle: CycleGeometry, slot: int) -> list[tuple[int, int, int]]:
        """Return what is cleared when ``slot`` is handed out to ``cycle``: (flat start, bytes, pool) of every page."""
        return [(start + slot * pitch, count, pool) for start, count, pitch, pool in cycle.clears]

    def copy_tokens(self, cycle: CycleGeometry, source: Page, target: Page, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of a block, in every pool of the slot."""
        first, second = source.slot * cycle.tokens, target.slot * cycle.tokens
        self.shadow.copy(cycle.read[first : first + tokens], cycle.read[second : second + tokens])

    def table_row(self, sequence: Sequence, cycle: int, beam: int, blocks: list[Page | None]) -> list[int]:
        """Return the row of the page table for one beam: slot ids, -1 where there is no page."""
        return [-1 if page is None else page.slot for page in blocks]

    def new_table(self) -> Table:
        """Return the table that the next step is given."""
        return {}

    def state_target(self, cycle: CycleGeometry, source: Page | None, live: Page, tokens: int) -> Page:
        """Return the page that a step of ``tokens`` tokens writes the new recurrent state to."""
        return live

    def padding_slot(self, cycle: CycleGeometry) -> int:
        """Return the slot that a padding row's state goes to."""
        page = self.dummies.get(cycle.cycle)
        return -1 if page is None else page.slot

    def snapshot(self, cycle: CycleGeometry, live: Page) -> Page | None:
        """Return a copy of a recurrent state to publish, None where no slot is free for it."""
        if not self.pools[cycle.group].free_count:
            return None
        page = self.allocate(cycle)
        self.shadow.copy(cycle.read[live.slot], cycle.read[page.slot])
        return page

    def has_room(self, needs: list[int], kept: set[Page]) -> bool:
        """Say whether every group has the slots needed, without evicting the pages ``kept``."""
        for pool, need in zip(self.pools, needs, strict=True):
            if need and need > pool.free_count + len(pool.cached) - sum(page in pool.cached for page in kept):
                return False
        return True

    def take_hits(self, hits: list[Page]) -> None:
        """Count a request as a holder of the pages that it reuses, before anything is allocated for it."""
        for page in hits:
            self.hold(page)

    def settle_hits(self, hits: list[Page]) -> None:
        """Called when everything else was allocated."""

    def withdraw(self, page: Page) -> None:
        """Withdraw the key of a page whose slot is about to be used for something else."""
        self.ledger.publish(page, published=False)
        self.tree.forget(page)

    def victim(self, pool: SlotPool) -> Page | None:
        """Return the cached page to evict next, None where every page is held."""
        return next(iter(pool.cached), None)

    def quiesce(self, sequence: Sequence) -> None:
        """Wait for the steps that read or write a sequence about to be suspended."""
        steps.complete_until(self, max((page.last_step for page in pages_of(sequence)), default=0))

    def extra_state(self) -> tuple[object, ...]:
        """Return what a faulty cache keeps beside the rest, for telling states apart."""
        return ()

    # Pages -----------------------------------------------------------------------------------------------------------

    def allocate(self, cycle: CycleGeometry) -> Page:
        """Return a new page of ``cycle``: a free slot, one of a cached page, or one that a step must be waited for."""
        page = Page(cycle.cycle, cycle.group, self.take_slot(cycle.group), 0)
        page.block_id = self.pools[cycle.group].block_ids[page.slot]
        self.ledger.take(page)
        self.ledger.clear(page, self.clear_ranges(cycle, page.slot))
        return page

    def take_slot(self, group: int) -> int:
        """Return a slot to use, evicting and waiting where it must; raise ``Refused`` when there is none."""
        pool = self.pools[group]
        while True:
            slot = pool.pop(self.ledger.completed)
            if slot is not None:
                return slot
            page = self.victim(pool)
            if page is not None:
                self.seen.add("eviction")
                pool.cached.pop(page, None)
                self.withdraw(page)
                self.free_page(page)
            elif pool.recycled:
                self.seen.add("wait for a step")
                steps.complete_until(self, min(step for _, step in pool.recycled))
            else:
                raise Refused("no-room", f"group {group} has no slot left of {pool.slots}")

    def hold(self, page: Page) -> None:
        """Add a holder."""
        self.ledger.hold(page)
        page.refs += 1
        pool = self.pools[page.group]
        pool.cached.pop(page, None)
        pool.host_cached.pop(page, None)

    def new_block(self, cycle: CycleGeometry) -> Page:
        """Return a new page with one holder."""
        page = self.allocate(cycle)
        self.hold(page)
        return page

    def release(self, page: Page) -> None:
        """Take a holder away; the last one frees the page, or leaves it cached where it is published."""
        self.ledger.drop(page)
        page.refs -= 1
        if page.refs:
            return
        pool = self.pools[page.group]
        if page.node is not None:
            (pool.cached if page.slot >= 0 else pool.host_cached)[page] = None
        elif page.slot >= 0:
            self.free_page(page)
        else:
            self.free_host(page)

    def free_page(self, page: Page) -> None:
        """Give the slot of ``page`` back."""
        slot = self.freed_slot(page)
        self.ledger.give_back(page, slot)
        self.pools[page.group].push(slot, self.ready_step(page))
        page.slot = -1

    def free_host(self, page: Page) -> None:
        """Give the host slot of ``page`` back."""
        self.ledger.host_give_back(page)
        self.pools[page.group].host_free.append(page.host)
        page.host = -1

    def require_room(self, needs: list[int], kept: set[Page], what: str) -> None:
        """Raise ``Refused`` unless every group has the slots that an operation needs."""
        if not self.has_room(needs, kept):
            counts = ", ".join(f"{need} of group {group}" for group, need in enumerate(needs) if need)
            raise Refused("no-room", f"{what} needs slots ({counts}) that are not free or evictable")

    # Sequences -------------------------------------------------------------------------------------------------------

    def admit(self, request: int, tokens: int, text: int) -> None:
        """Admit a request with a prompt; its longest published prefix is reused, all but the last token."""
        if request in self.sequences:
            raise Refused("known-request", f"request {request} is there already: free it first")
        if tokens == 0:
            raise Refused("no-tokens", "a prompt of 0 tokens: give at least 1")
        self._require_width(tokens)
        sequence = Sequence(request, text, self.contents.prompt(text, tokens), len(self.geometry.cycles))
        hit = self.match(sequence)
        full = len(hit.nodes)
        matched = full * self.block_tokens + hit.partial_tokens
        hits = self._place_hits(sequence, hit, matched)
        partial = [hit.partial.pages[cycle.cycle] for cycle in self.paged] if hit.partial is not None else []
        kept = hits + [page for page in partial if page is not None]
        needs = [0] * len(self.pools)
        for page in hits:
            needs[page.group] += page.slot < 0
        for cycle in self.paged:
            needs[cycle.group] += div_up(tokens, self.block_tokens) - full
        for cycle in self.recurrent:
            needs[cycle.group] += 1
        self.require_room(needs, set(kept), f"request {request} with {tokens} tokens")
        self.take_hits(kept)
        for page in hits:
            tiers.bring(self, page)
        for cycle in self.paged:
            row = sequence.blocks[cycle.cycle][0]
            while len(row) < div_up(tokens, self.block_tokens):
                row.append(self.new_block(cycle))
        for cycle in self.recurrent:
            sequence.blocks[cycle.cycle][0].append(self.new_block(cycle))
        self.settle_hits(kept)
        if hit.nodes:
            self.seen.add("state hit" if self.recurrent else "full-block hit")
        if hit.partial is not None:
            self.seen.add("hit in the middle of a block")
            self._copy_partial(sequence, hit, full)
            sequence.events[0] += hit.partial.events[: hit.partial_tokens]
        sequence.scheduled = sequence.done = sequence.history = matched
        sequence.committed = full * self.block_tokens
        self.sequences[request] = sequence

    def _place_hits(self, sequence: Sequence, hit: Hit, matched: int) -> list[Page]:
        """Put the pages of full blocks into the sequence's rows; return those that it reuses."""
        hits = []
        for cycle in self.paged:
            row = sequence.blocks[cycle.cycle][0]
            end = self.stale_end(cycle, matched)
            for block, node in enumerate(hit.nodes):
                page = None if cycle.sink_blocks <= block < end else node.pages[cycle.cycle]
                row.append(page)
                if page is not None:
                    hits.append(page)
        if hit.nodes:
            last = hit.nodes[-1]
            for cycle in self.recurrent:
                source = last.pages[cycle.cycle]
                if source is not None:
                    sequence.sources[cycle.cycle] = source
                    hits.append(source)
            sequence.state_events = [last.state_event]
        for node in hit.nodes:
            sequence.events[0] += node.events
            self._check_key(sequence, node, len(sequence.events[0]))
        return hits

    def _check_key(self, sequence: Sequence, node: Node, end: int) -> None:
        if node.contents[-1] != sequence.contents[0][end - 1]:
            scope = sequence.text >> 3
            self.shadow.report(
                "cache-key",
                f"request {sequence.request} (text {sequence.text & 7}, scope {scope}) reuses a block up to token "
                f"{end} whose tokens or scope are others",
                "make the key of a block depend on all that changes its bytes: every token before it, and the scope",
            )

    def _copy_partial(self, sequence: Sequence, hit: Hit, full: int) -> None:
        for cycle in self.paged:
            source = hit.partial.pages[cycle.cycle] if hit.partial is not None else None
            target = sequence.blocks[cycle.cycle][0][full]
            if source is not None and target is not None:
                self.copy_tokens(cycle, source, target, hit.partial_tokens)
                self.check_copy(cycle, target, hit.partial.events[: hit.partial_tokens] if hit.partial else ())
                self.release(source)

    def check_copy(self, cycle: CycleGeometry, target: Page, events: Iterable[int]) -> None:
        """Read a copied block back: every role of every layer must have come along."""
        wanted = list(events)
        first = target.slot * cycle.tokens
        self.shadow.read(cycle, range(first, first + len(wanted)), wanted, f"a look at the copy in slot {target.slot}")

    def match(self, sequence: Sequence) -> Hit:
        """Return the longest published prefix of a prompt that leaves at least its last token to compute."""
        contents, size = sequence.contents[0], self.block_tokens
        limit = len(contents) - 1
        nodes: list[Node] = []
        while (len(nodes) + 1) * size <= limit:
            node = self.tree.nodes.get(self.block_key(sequence.text, contents, (len(nodes) + 1) * size))
            if node is None or any(node.pages[cycle.cycle] is None for cycle in self.paged if cycle.window is None):
                break
            nodes.append(node)
        while nodes and not self._usable(nodes):
            nodes.pop()
        if self.recurrent:
            return Hit(tuple(nodes))
        end = len(nodes) * size
        partial, tokens = self.tree.longest_partial(nodes[-1] if nodes else None, contents[end:limit])
        if partial is None or any(
            (page := partial.pages[cycle.cycle]) is None or page.slot < 0 for cycle in self.paged
        ):
            return Hit(tuple(nodes))
        return Hit(tuple(nodes), partial, tokens)

    def _usable(self, nodes: list[Node]) -> bool:
        """Say whether windows find all blocks that they still need, and recurrent states a snapshot at the end."""
        history = len(nodes) * self.block_tokens
        for cycle in self.paged:
            if cycle.window is not None:
                end = self.stale_end(cycle, history)
                for block, node in enumerate(nodes):
                    if node.pages[cycle.cycle] is None and not cycle.sink_blocks <= block < end:
                        return False
        return all(nodes[-1].pages[cycle.cycle] is not None for cycle in self.recurrent)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Make room for ``tokens`` more tokens in every beam."""
        if tokens == 0:
            raise Refused("no-tokens", "room for 0 tokens: give at least 1")
        capacity = sequence.capacity + tokens
        self._require_width(capacity)
        more = div_up(capacity, self.block_tokens) - div_up(sequence.capacity, self.block_tokens)
        if more:
            needs = [0] * len(self.pools)
            for cycle in self.paged:
                needs[cycle.group] += more * sequence.beams
            self.require_room(needs, set(), f"request {sequence.request} with {tokens} more tokens")
            for cycle in self.paged:
                for row in sequence.blocks[cycle.cycle]:
                    row += [self.new_block(cycle) for _ in range(more)]
        sequence.capacity = capacity

    def _require_width(self, tokens: int) -> None:
        if div_up(tokens, self.block_tokens) > TABLE_BLOCKS:
            raise Refused(
                "table-width",
                f"{tokens} tokens are more than the {TABLE_BLOCKS} blocks of {self.block_tokens} in a row of the table",
            )

    def rewind(self, sequence: Sequence, tokens: int) -> None:
        """Take the last ``tokens`` tokens back, in the target's and the draft's layers alike."""
        capacity = sequence.capacity - tokens
        if tokens == 0:
            raise Refused("no-tokens", "a rewind by 0 tokens: give at least 1")
        if capacity < max(sequence.history, sequence.prompt):
            raise Refused(
                "below-history",
                f"request {sequence.request} would be left with {capacity} tokens, and "
                f"{max(sequence.history, sequence.prompt)} are accepted",
            )
        if self.recurrent and sequence.scheduled > capacity:
            raise Refused("state-cannot-rewind", f"request {sequence.request} has a recurrent state past {capacity}")
        keep = div_up(capacity, self.block_tokens)
        if keep < div_up(sequence.capacity, self.block_tokens):
            self.seen.add("rewind across a block boundary")
        if sequence.done < sequence.scheduled and capacity < sequence.scheduled:
            self.seen.add("rewind under a step")
        for cycle in self.paged:
            for row in sequence.blocks[cycle.cycle]:
                while len(row) > keep:
                    page = row.pop()
                    if page is not None:
                        self.release(page)
        sequence.capacity = capacity
        sequence.scheduled = min(sequence.scheduled, capacity)
        sequence.done = min(sequence.done, capacity)
        for beam in range(sequence.beams):
            for values in (sequence.events[beam], sequence.contents[beam], sequence.origin[beam]):
                del values[capacity:]

    def commit(self, sequence: Sequence) -> None:
        """Publish the full blocks that are written and accepted."""
        if sequence.beams > 1:
            raise Refused("beams", f"request {sequence.request} has {sequence.beams} beams: commit before the fork")
        if not self.publish(sequence):
            raise Refused("nothing-to-commit", f"request {sequence.request} has no further full block to publish")

    def publish(self, sequence: Sequence) -> bool:
        """Publish what can be; say whether anything was."""
        size, events = self.block_tokens, sequence.events[0]
        first, end = sequence.committed // size, self.committable(sequence) // size  # floor: full blocks only
        for block in range(first, end):
            contents = sequence.contents[0][: (block + 1) * size]
            key = self.block_key(sequence.text, contents, (block + 1) * size)
            node = self.tree.nodes.get(key)
            if node is None:
                before = self.block_key(sequence.text, contents, block * size) if block else None
                parent = self.tree.nodes.get(before) if block else None
                if block and parent is None:
                    return block > first  # an ancestor was evicted: nothing behind it can be found
                place = slice(block * size, (block + 1) * size)
                pages: list[Page | None] = [None] * len(self.geometry.cycles)
                node = Node(key, parent, tuple(contents[place]), tuple(events[place]), pages)
                self.tree.add(node)
            self._join(sequence, node, block)
            sequence.committed = (block + 1) * size
        return end > first

    def _join(self, sequence: Sequence, node: Node, block: int) -> None:
        """Publish a sequence's pages of one block, or let it go on with those that are published already."""
        size = self.block_tokens
        mine_events = tuple(sequence.events[0][block * size : (block + 1) * size])
        if not any(node.pages[cycle.cycle] for cycle in self.paged):
            node.events = mine_events  # all its pages were evicted
        same = node.events == mine_events
        rebase = not same and all(
            node.pages[cycle.cycle] is not None and node.pages[cycle.cycle].slot >= 0  # type: ignore[union-attr]
            for cycle in self.paged
            if sequence.blocks[cycle.cycle][0][block] is not None
        )
        if rebase:
            self.seen.add("rebase onto a published block")
            for cycle in self.paged:
                row, page = sequence.blocks[cycle.cycle][0], node.pages[cycle.cycle]
                mine = row[block]
                if mine is not None and page is not None and mine is not page:
                    self.hold(page)
                    row[block] = page
                    self.release(mine)
            sequence.events[0][block * size : (block + 1) * size] = node.events
        elif same:
            for cycle in self.paged:
                mine = sequence.blocks[cycle.cycle][0][block]
                if node.pages[cycle.cycle] is None and mine is not None and mine.node is None:
                    node.pages[cycle.cycle] = mine
                    mine.node = node
                    self.ledger.publish(mine, published=True)
        self._snapshot(sequence, node, block)

    def _snapshot(self, sequence: Sequence, node: Node, block: int) -> None:
        end = (block + 1) * self.block_tokens
        if not self.recurrent or sequence.scheduled != end or sequence.done != end:
            return
        if any(node.pages[cycle.cycle] is not None for cycle in self.recurrent):
            return
        for cycle in self.recurrent:
            live = sequence.blocks[cycle.cycle][0][0]
            page = None if live is None or cycle.cycle in sequence.sources else self.snapshot(cycle, live)
            if page is None:
                return
            node.pages[cycle.cycle] = page
            page.node = node
            self.ledger.publish(page, published=True)
            if page.refs == 0:
                self.pools[page.group].cached[page] = None
        self.seen.add("state snapshot")
        node.state_event = sequence.state_events[0]

    def free(self, sequence: Sequence) -> None:
        """End a request: all of its pages lose a holder."""
        if self.rules.stores_on_free and sequence.beams == 1 and not sequence.suspended:
            self.publish(sequence)
        if sequence.done < sequence.scheduled:
            self.seen.add("free under a step")
        for page in pages_of(sequence):
            self.release(page)
        del self.sequences[sequence.request]


def pages_of(sequence: Sequence) -> list[Page]:
    """Return all pages that a sequence holds, those that it holds several times as often."""
    rows = [page for cycle in sequence.blocks for row in cycle for page in row if page is not None]
    return rows + list(sequence.sources.values())
