"""The rules about a cache while it runs, judged by the ledger and the shadow of ``sim.cache``, not on a layout.

``sentinel``, ``bounds`` and ``alias`` hold of a layout and of a running cache alike.
"""

from __future__ import annotations

from .rule import Rule

NAMESPACE = Rule(
    "namespace",
    "an id is decoded where it was issued",
    "A block's identity, a slot of the device and a slot of the host are numbers of three kinds. The page table holds "
    "slots of the pool that it is used on, and names for every block of every request the slot where its page is now: "
    "an id that stays when memory is swapped is not where the memory is.",
    None,
)

CAPACITY = Rule(
    "capacity",
    "there is a page for every token that a step reads or writes",
    "A step writes tokens up to the length that its sequence has room for, in every beam and every layer, and reads "
    "what the sequence holds. Each of them has a page, and the sequence fits a row of the page table.",
    None,
)

CONSERVATION = Rule(
    "conservation",
    "every slot is either free or held, and never both",
    "Free slots and held slots of a group make all of its slots, after every operation and after every refusal. A slot "
    "is freed once, through the page that holds it, and is not handed out while another page has it.",
    None,
)

REFCOUNT = Rule(
    "refcount",
    "a shared or published page is neither written nor freed",
    "A page that several tables name, or whose key is published for reuse, is read by others: it is copied before the "
    "first write, and freed when its last holder has dropped it and its key is withdrawn. A hit counts as a holder "
    "before anything is evicted to make room.",
    None,
)

IN_FLIGHT = Rule(
    "in-flight",
    "what a dispatched step uses stays as it is until the step completes",
    "With one step dispatched ahead, freeing, moving and rewriting happen while kernels still run. A slot is handed "
    "out again after the newest step that names it, and a page table is rewritten after its reader.",
    None,
)

FRESHNESS = Rule(
    "freshness",
    "every byte read was written by its owner, at that position, before",
    "Every byte knows its request, beam, layer, role, position and step. A reader states for each byte whose it must "
    "be; a fresh page, a freed page, another request's token, another layer's role and yesterday's token at the same "
    "position are all wrong.",
    None,
)

WINDOW = Rule(
    "window",
    "what a pending query can attend to is kept",
    "A layer with a window of w tokens attends at position p to positions p + 1 - w to p, and to its sink blocks. A "
    "block is dropped when its last token is outside the window of the next query, not before, and once.",
    None,
)

CACHE_KEY = Rule(
    "cache-key",
    "equal keys mean equal bytes",
    "A published block is found by a key. Whatever changes the block's bytes is part of the key: all tokens before it "
    "and in it, the LoRA adapter, the cache salt, images. Two blocks of one key must be interchangeable.",
    None,
)
