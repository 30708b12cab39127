"""What SGLang answered, recorded, as layouts: equal to the models', and every change in the answer is seen."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsan.ci.engines.sglang import VARIANTS
from kvsan.model.errors import SpecError
from kvsan.model.spec import CacheSpec, decode_spec
from kvsan.sim.checking import check
from kvsan.sim.engines.answer import read_answer
from kvsan.sim.engines.difference import differences
from kvsan.sim.engines.sglang import layout_of, request_of
from kvsan.sim.layout import Layout
from kvsan.sim.rejection import Rejected

RECORDED = json.loads((Path(__file__).parent / "sglang_answers.json").read_text(encoding="utf-8"))
"""Recorded from SGLang 0.5.23 on the meta device; tests/ci/engines/test_sglang.py records them."""
WINDOWS, LATENT, FOUR_BITS, ENVELOPE, SPECULATIVE, UNIFIED = range(len(RECORDED))


def recorded(number: int) -> tuple[str, CacheSpec, dict[str, Any]]:
    """Return the allocator, the spec, and a copy of the answer that a test may change."""
    entry = RECORDED[number]
    return entry["allocator"], decode_spec(json.dumps(entry["spec"]).encode()), copy.deepcopy(entry["answer"])


def laid_out(number: int, answer: dict[str, Any]) -> Layout:
    name, spec, _ = recorded(number)
    return layout_of(spec, read_answer(answer, "SGLang"), name, "SGLang")


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_an_answer_is_the_models_layout_without_a_finding(number: int) -> None:
    name, spec, answer = recorded(number)
    layout = laid_out(number, answer)
    assert list(differences(layout, VARIANTS[name][1](spec))) == []
    assert check(layout) == []


@pytest.mark.parametrize("number", range(len(RECORDED)))
@pytest.mark.parametrize("place", [0, -1])
def test_a_tensor_that_moved_is_a_difference(number: int, place: int) -> None:
    name, spec, answer = recorded(number)
    answer["views"][place]["offset"] += 64
    assert list(differences(laid_out(number, answer), VARIANTS[name][1](spec)))


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_a_tensor_of_another_shape_is_a_fault(number: int) -> None:
    _, _, answer = recorded(number)
    answer["views"][0]["shape"][-1] += 1
    with pytest.raises(Rejected, match="and the layer needs") as caught:
        laid_out(number, answer)
    assert caught.value.rule == "unexplained-rejection"


def test_a_tensor_that_is_not_there_is_a_fault() -> None:
    _, _, answer = recorded(FOUR_BITS)
    del answer["views"][-1]
    with pytest.raises(Rejected, match=r"made no tensor for value_block_scale of target\.full\.1"):
        laid_out(FOUR_BITS, answer)


def test_a_tensor_of_a_layer_that_has_none_makes_no_sense() -> None:
    _, _, answer = recorded(FOUR_BITS)
    answer["views"][0]["part"] = 9
    with pytest.raises(SpecError, match="which it was not asked for"):
        laid_out(FOUR_BITS, answer)


def test_only_the_overlap_that_is_meant_is_allowed() -> None:
    """Windows that do not step at all share all of their taps; nobody meant that, and it is an alias."""
    _, _, answer = recorded(SPECULATIVE)
    [first, *_] = [view for view in answer["views"] if view["axes"][1:2] == ["draft"] and view["item"] == 2]
    assert first["stride"][1] == 1
    first["stride"][1] = 0
    assert [found.rule for found in check(laid_out(SPECULATIVE, answer))][:1] == ["alias"]


def test_overlapping_windows_of_two_slots_are_an_alias() -> None:
    _, _, answer = recorded(SPECULATIVE)
    [first, *_] = [view for view in answer["views"] if view["axes"][1:2] == ["draft"] and view["item"] == 2]
    first["stride"][0] -= 1
    assert "alias" in [found.rule for found in check(laid_out(SPECULATIVE, answer))]


def test_ends_that_meet_are_a_fault() -> None:
    _, _, answer = recorded(UNIFIED)
    answer["reported"]["states.max_slots"] -= 1
    with pytest.raises(Rejected, match="has no room for 4 pages and 8 states"):
        laid_out(UNIFIED, answer)


def test_a_unified_buffer_without_room_is_a_fault() -> None:
    _, _, answer = recorded(UNIFIED)
    answer["reported"]["full.min_slot"] = answer["reported"]["full.max_slots"]
    with pytest.raises(Rejected, match="has no room for 4 pages and 8 states"):
        laid_out(UNIFIED, answer)


def test_states_of_two_layers_that_share_bytes_are_an_alias() -> None:
    _, _, answer = recorded(UNIFIED)
    states = [view for view in answer["views"] if view["name"].startswith("target.states")]
    states[1]["offset"] = states[0]["offset"]
    assert "alias" in [found.rule for found in check(laid_out(UNIFIED, answer))]


def test_a_report_that_differs_from_the_storages_is_noted() -> None:
    _, _, answer = recorded(FOUR_BITS)
    assert len(laid_out(FOUR_BITS, answer).notes) == 1
    answer["reported"]["target.full.key"] -= 512
    assert "the engine reports" in laid_out(FOUR_BITS, answer).notes[1]


def test_a_published_fp8_row_is_asked_for_by_its_parts() -> None:
    _, spec, _ = recorded(LATENT)
    [manager] = request_of(spec, "plain")["managers"]
    assert {key: manager["full"][key] for key in ("kind", "rank", "rope", "dim", "indexed")} == {
        "kind": "dsa", "rank": 512, "rope": 64, "dim": 656, "indexed": [0],
    }  # fmt: skip
    rows = msgspec.structs.replace(spec, layers=(msgspec.structs.replace(spec.layers[0], side_planes=()),))
    assert request_of(rows, "plain")["managers"][0]["full"]["kind"] == "mla"
