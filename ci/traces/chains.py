"""What every trace that shows a fault must contain: kinds of operations in order, with the reason.

A chain makes the enumeration of a long minimum short: a trace of n operations that contains a chain of n is nothing but
the chain, whatever its arguments, and one of n + 1 has a single operation more. Every reason is an argument about the
code of the cache (``sim/cache``), not a measurement: who calls what the fault overrides, and what must have happened
before. All of these but ``block-id-is-slot`` run by V2's rules, where ``commit`` alone publishes.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Chain(msgspec.Struct, frozen=True):
    """``kinds`` must occur in this order, each place by one of its alternatives; ``why`` says so in words."""

    kinds: tuple[tuple[str, ...], ...]
    why: str

    def matched(self, count: int, kind: str) -> int:
        """Return how many places are taken after one more operation, where ``count`` were before it."""
        return count + (count < len(self.kinds) and kind in self.kinds[count])


_TAKES_A_SLOT: Final = ("admit", "extend", "fork", "step", "commit", "free", "resume", "onload")
"""What may take a slot: new pages, the state of a padding row, snapshots (V1 publishes in ``free``), pages from the
host."""
_DONE: Final = ("complete", "suspend", *_TAKES_A_SLOT)
"""What may complete a step: a suspension waits for the request's steps, and whatever takes a slot for that slot's."""
_WRITTEN: Final = (("admit",), ("step",), _DONE)
"""A token is written when a step that it was given to is completed."""
_PUBLISHED: Final = (*_WRITTEN, ("commit",))
"""A page is published by V2 when it is committed, which takes accepted tokens that are written."""

CHAINS: Final[dict[str, Chain]] = {
    "fault:padding-writes-slot-zero": Chain(
        (("admit",), ("step",)), "padding rows come with a step, and a step needs a request."
    ),
    "fault:one-host-table": Chain(
        (("admit",), ("step",), ("step",)), "a table is filled by a step, and filled anew by another."
    ),
    "fault:window-end-off-by-one": Chain(
        (("admit",), ("step",), ("step",)),
        "a query misses a token before it: one of an earlier step, its own request's or that of the pages that it hit.",
    ),
    "fault:published-before-written": Chain(
        (("admit",), ("step",), ("commit",)),
        "V2 publishes by commits alone, and nothing is to be written without a step.",
    ),
    "fault:copy-two-planes": Chain(
        (*_WRITTEN, ("fork", "admit")),
        "tokens are copied by a fork and by a hit in the middle of a block, and both need tokens that a completed step "
        "has written.",
    ),
    "fault:key-without-lora": Chain(
        (*_PUBLISHED, ("admit",)), "a key is taken for another's by an admission that hits a published page."
    ),
    "fault:block-id-is-slot": Chain(
        (*_WRITTEN, ("free", "commit"), ("offload",), ("admit", "extend", "fork", "onload"), ("step",)),
        "a page's id and its slot part in a swap with the host alone, so a page must be offloaded. V1 moves cached "
        "pages only, which were written and then published by a commit or by the end of their request. A page that "
        "stays on the device keeps its id and its slot: the one that is misnamed came into a slot after the swap, and "
        "a step that is dispatched then reads the table.",
    ),
    "fault:short-chunk-writes-source": Chain(
        (*_PUBLISHED, ("admit",), ("step",)),
        "a state has a source for one step after a hit, so a snapshot was published and another prompt admitted; the "
        "step of that prompt is what writes.",
    ),
    "fault:partial-copy-forgets-scales": Chain(
        (*_WRITTEN, ("fork", "admit")),
        "tokens are copied by a fork and by a hit in the middle of a block, and both need tokens that a completed step "
        "has written.",
    ),
    "fault:hit-not-held": Chain(
        (*_PUBLISHED, ("admit",)),
        "only an admission holds hits, and there is nothing to hit before a page is published.",
    ),
    "fault:snapshot-is-live-state": Chain(
        (*_PUBLISHED, ("step",)),
        "a state is published by a commit, and written again by a step alone; no commit is possible under a step.",
    ),
    "fault:stale-key-after-eviction": Chain(
        (*_PUBLISHED, ("offload", *_TAKES_A_SLOT), ("admit",)),
        "a published page loses its key when something else takes its slot (a new page, the state of a padding row, a "
        "page from the host) or its place on the host; only an admission finds it by the key that stayed.",
    ),
    "fault:rewind-leaves-table": Chain(
        (("admit",), ("extend",), ("rewind",), ("extend",), ("step",)),
        "no rewind goes below the prompt, so a block that it drops was added by an extension; its old entry shows in "
        "the table of a step when the row is as long again, which takes another extension (a request that is freed "
        "takes its entries along).",
    ),
}
"""The chains of faults whose minima take more than seconds to enumerate without."""
