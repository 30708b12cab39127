"""``kvsan bench``: the structure of what is measured; speed itself is never a test."""

from __future__ import annotations

import itertools

import pytest

from kvsan.ci.bench import fuzzing
from kvsan.ci.bench.fuzzing import a12, bench_fuzz
from kvsan.ci.faults import FAULTS, fault_named
from kvsan.model.errors import SpecError


@pytest.mark.parametrize(
    ("first", "second", "chance"),
    [
        ([1, 2, 3], [4, 5, 6], 1.0),
        ([4, 5, 6], [1, 2, 3], 0.0),
        ([1, 2, 3], [1, 2, 3], 0.5),
        ([5], [5], 0.5),
        ([1, 4], [2, 3], 0.5),
        ([1, 2], [2, 3], 0.875),
        ([2, 3], [1, 2], 0.125),
        ([1, 1, 1, 9], [2], 0.75),
        ([1], [1, 2, 3, 4], 0.875),
    ],
)
def test_the_a12_of_known_samples(first, second, chance) -> None:
    """By hand: pairs in which the first is smaller, and half of those that tie, over all pairs."""
    assert a12(first, second) == chance
    assert a12(second, first) == 1 - chance


def test_the_a12_is_a_count_over_pairs() -> None:
    for first in itertools.product(range(3), repeat=3):
        second = (0, 1, 1, 2)
        pairs = list(itertools.product(first, second))
        wins = sum(one < other for one, other in pairs) + sum(one == other for one, other in pairs) / 2
        assert a12(first, second) == pytest.approx(wins / len(pairs))


@pytest.mark.parametrize(("first", "second"), [([], [1]), ([1], []), ([], [])])
def test_the_a12_of_nothing_is_refused(first, second) -> None:
    with pytest.raises(SpecError, match="needs at least one value on each side"):
        a12(first, second)


def test_a_fault_over_two_seeds(monkeypatch) -> None:
    monkeypatch.setattr(fuzzing, "MAX_EXAMPLES", 400)
    told: list[str] = []
    found = bench_fuzz(2, "fault:swap-kv-lanes", told.append)
    (row,) = found.faults
    fault = fault_named("fault:swap-kv-lanes")
    assert (row.fault, row.seeds, row.found, row.found_plain) == (fault.name, 2, 2, 2)
    assert 1 <= row.examples <= 400
    assert 1 <= row.examples_plain <= 400
    assert row.seconds > 0
    assert 0 <= row.a12 <= 1
    assert (row.at_minimum, row.size, row.minimum_size) == (2, fault.size, fault.size)
    assert found.rates == []
    assert found.ratio_limit == 0.5
    assert told == ["fault:swap-kv-lanes: 2 of 2 seeds, 2 at the minimum"]


def test_a_fault_that_is_not_found_in_time(monkeypatch) -> None:
    """One example finds nothing: counted as one more than the budget, and nothing is reduced."""
    monkeypatch.setattr(fuzzing, "MAX_EXAMPLES", 1)
    (row,) = bench_fuzz(1, "fault:coalesce-by-size").faults
    assert (row.found, row.found_plain, row.at_minimum) == (0, 0, 0)
    assert (row.examples, row.examples_plain, row.a12) == (2, 2, 0.5)
    assert row.size == 0


def test_rates_are_measured_for_the_sound_allocators(monkeypatch) -> None:
    monkeypatch.setattr(fuzzing, "FAULTS", FAULTS[:0])
    monkeypatch.setattr(fuzzing, "TRANSFER_FAULTS", ())
    monkeypatch.setattr(fuzzing, "RATE_CHUNKS", 1)
    monkeypatch.setattr(fuzzing, "CHUNK_EXAMPLES", 40)
    found = bench_fuzz(1, None)
    assert [rate.allocator for rate in found.rates] == ["trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed"]
    for rate in found.rates:
        assert rate.ratio == pytest.approx(rate.campaign_per_second / rate.drawing_per_second)
        assert rate.drawing_per_second > 0


def test_a_faulty_transfer_is_benched(run) -> None:
    options = ("bench", "fuzz", "--seeds", "1", "--fault", "fault:layers-by-position")
    ran = run(*options, "--json")
    assert ran.status == 0
    (row,) = ran.document["transfers"]
    assert (row["fault"], row["seeds"], row["found"], row["at_minimum"]) == ("fault:layers-by-position", 1, 1, 1)
    assert 1 <= row["examples"] <= fuzzing.MAX_PAIRS
    assert (row["size"], ran.document["faults"], ran.document["rates"]) == (row["minimum_size"], [], [])


def test_the_document_and_the_report(run, monkeypatch) -> None:
    monkeypatch.setattr(fuzzing, "MAX_EXAMPLES", 100)
    options = ("bench", "fuzz", "--seeds", "1", "--fault", "fault:canary")
    ran = run(*options, "--json")
    assert ran.status == 0
    assert set(ran.document) == {"faults", "rates", "transfers", "ratio_limit"}
    assert ran.document["faults"][0]["fault"] == "fault:canary"
    ran = run(*options)
    assert "canary" in ran.out
    assert "1/1 (1)" in ran.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["lunch"], "BENCH: found 'lunch', needs one of check, fuzz"),
        (["fuzz", "--seeds", "0"], "--seeds: found '0', needs a whole number from 1 to 10000"),
        (["fuzz", "--seeds", "-1"], "--seeds: found '-1'"),
        (["fuzz", "--seeds", "x"], "--seeds: found 'x'"),
        (["fuzz", "--seeds", "10001"], "--seeds: found '10001'"),
        (["fuzz", "--seeds", "9" * 5000], "--seeds: found '999"),
        (["fuzz", "--seeds", ""], "--seeds: found ''"),
        (["fuzz", "--seeds", "٣"], "--seeds: found '٣'"),
        (["fuzz", "--fault", "canary"], "--fault: unknown fault 'canary', needs one of fault:canary"),
        (["check", "--config", "no-such-file.json"], "--config: no-such-file.json is not there"),
        ([], "Missing argument"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_option_is_one_line(run, options, message) -> None:
    ran = run("bench", *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsan: {message}")
    assert ran.err.count("\n") == 1


def test_without_an_engine_its_bench_ends_in_one_line(run, monkeypatch) -> None:
    monkeypatch.setenv("KVSAN_VLLM_PYTHON", "/nowhere/python")
    ran = run("bench", "engines")
    assert ran.status == 2
    assert "KVSAN_VLLM_PYTHON names" in ran.err
