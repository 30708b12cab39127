"""The two rules about refusals; they are judged where an allocator is called, not on a layout."""

from __future__ import annotations

from .rule import Rule

REJECTED = Rule(
    "rejected",
    "an allocator refuses a spec that it declares to support",
    "Refusing loudly is better than laying out wrongly, and a refusal names its cause and the way out. But a spec "
    "inside what an allocator supports must be laid out: its refusal is a fault of the allocator. Refusing a spec "
    "outside is the allocator's right: `check` still exits with 1, a campaign does not count it.",
    None,
)

UNEXPLAINED = Rule(
    "unexplained-rejection",
    "an allocator fails without saying why",
    "An AssertionError, ZeroDivisionError or KeyError out of an allocator tells its user nothing, and an assertion "
    "is gone under `python -O`, where the same configuration is laid out wrongly instead. Judged by the type of the "
    "exception: anything but an explained refusal counts.",
    None,
)
