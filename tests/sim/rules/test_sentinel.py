from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("sentinel", sound_layout) == []


@pytest.mark.parametrize(
    ("lanes", "guard"),
    [((-1, -1), "negative"), ((-1, -1), None), ((-1,), "negative"), ((0, 0), "length"), ((7, 7), "length"), ((), None)],
)
def test_entries_that_reach_nothing(
    sound: Mapping[str, Layout], change: Change, found: Found, lanes: tuple[int, ...], guard: str | None
) -> None:
    layout = change(sound["v2-dense"], "tables", 0, missing_lanes=lanes, missing_guard=guard)
    assert found("sentinel", layout) == []


@pytest.mark.parametrize(
    ("lanes", "guard", "indices", "reached", "reason"),
    [
        # V as K plus one, for the sentinel too: page 0 of slot 0
        ((-1, 0), "negative", "K -1, V 0", "V index 0 is page 0 of slot 0", "consumers skip negative indices only"),
        ((-1, 0), None, "K -1, V 0", "V index 0 is page 0 of slot 0", "nothing keeps consumers from it"),
        ((0, 0), None, "K 0, V 0", "K index 0 is page 0 of slot 0", "nothing keeps consumers from it"),
        ((0, 0), "negative", "K 0, V 0", "K index 0 is page 0 of slot 0", "consumers skip negative indices only"),
        ((0, 1), "length", "K 0, V 1", "K index 0 is page 0 of slot 0", "its lanes differ"),
        ((-1, 0), "length", "K -1, V 0", "V index 0 is page 0 of slot 0", "its lanes differ"),
        ((9, 9), None, "K 9, V 9", "K index 9 is page 3 of slot 1", "nothing keeps consumers from it"),
    ],
)
def test_entries_that_reach_a_live_page(
    sound: Mapping[str, Layout],
    change: Change,
    found: Found,
    lanes: tuple[int, ...],
    guard: str | None,
    indices: str,
    reached: str,
    reason: str,
) -> None:
    layout = change(sound["v2-dense"], "tables", 0, missing_lanes=lanes, missing_guard=guard)  # 6 pages per slot
    findings = found("sentinel", layout)
    assert len(findings) == 1
    assert findings[0].message.startswith(f"a missing page has indices {indices} in the page table: {reached}")
    assert reason in findings[0].message
    assert findings[0].where[0].layer == 0


def test_a_k_only_table(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = sound["v2-latent"]
    assert layout.tables[0].missing_lanes == (0,)
    findings = found("sentinel", change(layout, "tables", 0, missing_guard=None))
    assert findings[0].message.startswith("a missing page has indices K 0 in the page table: K index 0 is page 0")


def test_every_table_is_judged(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = sound["v2-per-layer"]
    for number in range(len(layout.tables)):
        findings = found("sentinel", change(layout, "tables", number, missing_guard=None))
        assert [where.layer for where in findings[0].where] == list(layout.tables[number].layers)
