"""Rule ``unexplained-rejection``: an exception that is no explained refusal tells an engine's user nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsan.model.errors import SpecError
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.sim.rules import RULES

RULE = next(rule for rule in RULES if rule.name == "unexplained-rejection")
SPEC = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=16),))


def fails(error: Exception) -> Callable[[CacheSpec], Layout]:
    def allocator(spec: CacheSpec) -> Layout:
        raise error

    return allocator


def test_the_rule_is_judged_where_an_allocator_is_called() -> None:
    assert RULE.check is None
    assert RULE.summary
    assert RULE.explanation


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AssertionError(), "the allocator refused with AssertionError and no message"),
        (AssertionError("24576 % 16384"), "the allocator refused with AssertionError: 24576 % 16384"),
        (ZeroDivisionError("division by zero"), "the allocator refused with ZeroDivisionError: division by zero"),
        (KeyError(7), "the allocator refused with KeyError: 7"),
        (ValueError("several\nlines\n  here"), "the allocator refused with ValueError: several lines here"),
        (RecursionError("x" * 5000), "the allocator refused with RecursionError: " + "x" * 297 + "..."),
        (MemoryError(), "the allocator refused with MemoryError and no message"),
    ],
)
def test_any_other_exception_counts(error: Exception, message: str) -> None:
    with pytest.raises(Rejected) as caught:
        allocate(SPEC, fails(error))
    assert caught.value.rule == "unexplained-rejection"
    assert caught.value.message == message
    assert "kvsan.Rejected" in caught.value.remedy
    assert caught.value.supported
    assert caught.value.__cause__ is error


def test_explained_refusals_pass_through() -> None:
    refusal = Rejected("the cause", "the way out", supported=False)
    with pytest.raises(Rejected) as caught:
        allocate(SPEC, fails(refusal))
    assert caught.value is refusal
    assert caught.value.rule == "rejected"


def test_bad_input_stays_bad_input() -> None:
    with pytest.raises(SpecError):
        allocate(SPEC, fails(SpecError("layers", "found none")))


def test_the_user_can_still_interrupt() -> None:
    def allocator(spec: CacheSpec) -> Layout:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        allocate(SPEC, allocator)
