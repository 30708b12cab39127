"""``kvsan shrink``: any case, hand-written ones too, down to the simplest that breaks the same rule."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.cases import Case, FoundRule, load_case, save_case
from kvsan.ci.faults import fault_named
from kvsan.ci.simplicity import size
from kvsan.cli import shrink_run
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import INDEX_KEY, SidePlane
from kvsan.model.spec import AttentionLayer, CacheSpec, ParallelLayout, decode_spec
from kvsan.sim.allocators.trtllm.limits import LIMITS
from kvsan.sim.layout import Layout
from kvsan.sim.limits import KnownLimit
from kvsan.sim.rejection import Rejected
from kvsan.sim.verdict import judge

CANARY = fault_named("fault:canary").minimum
LARGE = CacheSpec(
    layers=(AttentionLayer(kv_heads=8, head_dim=96, window=128),) * 5,
    kv_format="fp8",
    tokens_per_block=32,
    parallel=ParallelLayout(tp=2),
    slots=4,
)


def saved(folder: Path, allocator: str, spec: CacheSpec, *rules: str) -> Path:
    found = tuple(FoundRule(rule=rule, message="as it was") for rule in rules)
    return save_case(Case(allocator=allocator, input=spec, found=found), folder)


def test_a_hand_written_case_becomes_the_known_minimum(run, tmp_path) -> None:
    path = tmp_path / "mine.json"
    spec = {"kvsan": "spec", "layers": [{"kind": "attention", "kv_heads": 8, "head_dim": 96}] * 3, "kv_format": "fp8"}
    path.write_text(json.dumps({"kvsan": "case", "version": 1, "allocator": "fault:canary", "input": spec}))
    before = path.read_bytes()
    ran = run("shrink", path, "--rule", "alias", "--json")
    assert (ran.status, ran.err) == (1, "")
    document = ran.document
    assert (document["allocator"], document["rule"], document["interrupted"]) == ("fault:canary", "alias", False)
    assert (document["size"], document["size_before"]) == (3, 9)
    assert document["checks"] > 1
    assert msgspec.convert(document["spec"], CacheSpec) == CANARY
    result = load_case(Path(document["case"]))
    assert result.input == CANARY
    assert result.found == (FoundRule(rule="alias", message=document["message"]),)
    assert Path(document["case"]).parent == tmp_path, "beside the case"
    assert path.read_bytes() == before


def test_the_minimum_stays_as_it_is(run, tmp_path) -> None:
    first = Path(run("shrink", saved(tmp_path, "fault:canary", LARGE, "alias"), "--json").document["case"])
    before = first.read_bytes(), first.stat().st_ino
    ran = run("shrink", first, "--json")
    assert ran.status == 1
    assert ran.document["case"] == str(first)
    assert ran.document["size"] == ran.document["size_before"]
    assert (first.read_bytes(), first.stat().st_ino) == before
    assert run("shrink", first).out.startswith("alias: already minimal, size 3 in ")


def test_other_rules_of_the_minimum_are_kept(run, tmp_path) -> None:
    path = saved(tmp_path, "fault:canary", CANARY, "alias", "adjacency")
    assert run("shrink", path).status == 1
    assert load_case(path).found == (
        FoundRule(rule="alias", message="as it was"),
        FoundRule(rule="adjacency", message="as it was"),
    )


def test_the_report_says_how_small_it_got(run, tmp_path) -> None:
    ran = run("shrink", saved(tmp_path, "fault:canary", LARGE, "alias"))
    assert ran.status == 1
    for words in (
        "alias: size 15 -> 3 in ",
        " checks (size: layers + buffers)\n",
        "layer 0: attention, 1 KV head x 128",
        f"saved as {tmp_path}",
    ):
        assert words in ran.out


def test_a_case_that_fails_no_more_is_left_alone(run, tmp_path) -> None:
    path = saved(tmp_path, "trtllm-v2", LARGE, "alias")
    for rule in ([], ["--rule", "alias"]):
        ran = run("shrink", path, *rule, "--json")
        assert ran.status == 0
        assert ran.document["rule"] is None
        assert ran.document["allocator"] == "trtllm-v2"
    assert "nothing to shrink" in run("shrink", path).out
    assert os.listdir(tmp_path) == [path.name]


def test_the_keys_are_always_there(run, tmp_path) -> None:
    broken = run("shrink", saved(tmp_path, "fault:canary", CANARY, "alias"), "--json").document
    clean = run("shrink", saved(tmp_path, "trtllm-v2", CANARY, "alias"), "--json").document
    assert set(broken) == set(clean)


def test_the_rule_to_keep(run, tmp_path) -> None:
    path = saved(tmp_path, "fault:canary", LARGE, "op-address", "alias")
    assert run("shrink", path, "--json").document["rule"] == "op-address", "the case's own first"
    assert run("shrink", path, "--rule", "adjacency", "--json").document["rule"] == "adjacency"
    stale = saved(tmp_path / "other", "fault:canary", LARGE, "bounds")
    assert run("shrink", stale, "--json").document["rule"] in {"alias", "adjacency", "op-address"}
    ran = run("shrink", path, "--rule", "int32")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvsan: --rule: fault:canary does not break 'int32' on this case, it breaks ")
    ran = run("shrink", path, "--rule", "no-such")
    assert ran.err.startswith("kvsan: --rule: found 'no-such', needs the name of a rule")
    assert ran.err.count("\n") == 1


def test_another_folder_for_the_result(run, tmp_path) -> None:
    path = saved(tmp_path / "in", "fault:canary", LARGE, "alias")
    ran = run("shrink", path, "--output", tmp_path / "new" / "out", "--json")
    assert Path(ran.document["case"]).parent == tmp_path / "new" / "out"
    assert os.listdir(tmp_path / "in") == [path.name]


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(run, tmp_path, monkeypatch) -> None:
    path = saved(tmp_path, "fault:canary", LARGE, "alias")
    monkeypatch.setattr(shrink_run, "reduce_spec", None)
    for output in (path, path / "below"):
        ran = run("shrink", path, "--output", output)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("kvsan: --output: ")
        assert ran.err.count("\n") == 1


def test_interrupted_it_saves_the_smallest_so_far(run, tmp_path, monkeypatch) -> None:
    path = saved(tmp_path, "fault:canary", LARGE, "alias")
    halfway = msgspec.structs.replace(LARGE, layers=LARGE.layers[:2])

    def reduce_in_part(spec, fails):
        assert fails(spec)
        assert fails(halfway)
        raise KeyboardInterrupt

    monkeypatch.setattr(shrink_run, "reduce_spec", reduce_in_part)
    ran = run("shrink", path, "--json")
    assert (ran.status, ran.err) == (130, "kvsan: interrupted\n")
    assert ran.document["interrupted"] is True
    assert load_case(Path(ran.document["case"])).input == halfway


def test_a_fault_does_not_turn_into_a_known_limit(run, tmp_path, own) -> None:
    """A finding outside the known limits stays outside; one inside is shrunk to the limit's own example."""
    plane = SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16)
    sparse = AttentionLayer(kv_heads=1, head_dim=128, side_planes=(plane,))
    inside = CacheSpec(layers=(sparse, AttentionLayer(kv_heads=1, head_dim=128)) * 2, slots=3)
    path = saved(
        tmp_path, "trtllm-v2-qsa-packed", msgspec.structs.replace(inside, layers=inside.layers[:2]), "rejected"
    )
    document = run("shrink", path, "--json").document
    (limit,) = [limit for limit in LIMITS if limit.matches.__name__ == "packed_plane_meets_pages"]
    assert msgspec.convert(document["spec"], CacheSpec) == decode_spec(limit.example)


def test_an_answer_that_is_no_layout(run, own, tmp_path) -> None:
    path = saved(tmp_path, f"{own}:number", CANARY, "alias")
    ran = run("shrink", path, "--allocator", f"{own}:number")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"kvsan: --allocator: '{own}:number': returned 3, needs a kvsan.Layout\n"


def test_an_own_allocator_is_shrunk_when_it_is_given_too(run, own, tmp_path) -> None:
    path = saved(tmp_path, f"{own}:bare", LARGE, "unexplained-rejection")
    ran = run("shrink", path, "--allocator", f"{own}:bare", "--json")
    assert ran.status == 1
    spec = msgspec.convert(ran.document["spec"], CacheSpec)
    assert len(spec.layers) == 1
    assert size(spec) <= 3
    assert judge(spec, f"{own}:bare").faults


def say_what_breaks(spec: CacheSpec) -> Layout:
    """Refuse in two ways by one rule: three layers or more for one reason, fewer for another."""
    reason = "layers in no group" if len(spec.layers) >= 3 else "an empty group"
    raise Rejected(reason, "report it", rule="unexplained-rejection")


@pytest.mark.parametrize(("words", "layers"), [(("no group",), 3), (("empty",), 3), (("",), 1)])
def test_a_known_fault_does_not_turn_into_another_of_its_rule(run, tmp_path, monkeypatch, words, layers) -> None:
    """Found by reading: a limit excused by its rule, whatever it says, let one defect of an engine become another.

    The first limit explains the case, and the result stays inside; the second explains what it could turn into, and the
    result stays outside; the third explains both.
    """
    limit = KnownLimit("one", ("own",), ("unexplained-rejection",), lambda spec: True, "", b"", words)
    monkeypatch.setattr(shrink_run, "resolve", lambda name: say_what_breaks)
    monkeypatch.setattr(shrink_run, "limits_of", lambda name: (limit,))
    document = run("shrink", saved(tmp_path, "trtllm-v2", LARGE, "unexplained-rejection"), "--json").document
    assert len(document["spec"]["layers"]) == layers
