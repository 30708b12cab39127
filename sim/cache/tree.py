"""``Tree``: full blocks that were published for reuse, found by their key.

A block's key is the number of the tokens up to its end (``contents``), scope included, so equal keys mean equal bytes.
Nodes hold one page per life cycle, or None where it was evicted, went stale before, or was never there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from .pages import Page

MAX_PARTIAL_CHILDREN: Final = 32
"""Children of a block from which on no partial match is tried."""


class Node:
    """One published block: the contents and events of its tokens, and a page for each life cycle."""

    __slots__ = ("children", "contents", "events", "key", "pages", "parent", "state_event")

    def __init__(
        self,
        key: Hashable,
        parent: Node | None,
        contents: tuple[int, ...],
        events: tuple[int, ...],
        pages: list[Page | None],
    ) -> None:
        self.key = key
        self.parent = parent
        self.contents = contents
        self.events = events
        self.pages = pages
        self.children: dict[Hashable, Node] = {}
        self.state_event = 0


class Tree:
    """All published blocks by key; ``roots`` are the first blocks."""

    def __init__(self) -> None:
        self.nodes: dict[Hashable, Node] = {}
        self.roots: dict[Hashable, Node] = {}

    def add(self, node: Node) -> None:
        """Publish ``node`` behind its parent."""
        self.nodes[node.key] = node
        (self.roots if node.parent is None else node.parent.children)[node.key] = node

    def forget(self, page: Page) -> None:
        """Take ``page`` out of its node, and the node out of the tree when it holds nothing and leads nowhere."""
        node = page.node
        page.node = None
        if node is None:
            return
        if node.pages[page.cycle] is page:
            node.pages[page.cycle] = None
        while node is not None and not node.children and not any(node.pages):
            parent = node.parent
            if self.nodes.get(node.key) is node:
                del self.nodes[node.key]
                (self.roots if parent is None else parent.children).pop(node.key, None)
            node = parent

    def longest_partial(self, parent: Node | None, contents: Sequence[int]) -> tuple[Node | None, int]:
        """Return the child of ``parent`` (None: of the root) that shares most of ``contents``, and how many tokens."""
        children = self.roots if parent is None else parent.children
        best, tokens = None, 0
        if len(children) >= MAX_PARTIAL_CHILDREN:
            return best, tokens
        for child in children.values():
            shared = 0
            for one, other in zip(child.contents, contents, strict=False):
                if one != other:
                    break
                shared += 1
            if shared > tokens:
                best, tokens = child, shared
        return best, tokens
