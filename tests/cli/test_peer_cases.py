"""Pairs as cases: ``fuzz --peers``, and ``peers``, ``check`` and ``shrink`` for a saved pair."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvsan.ci.cases import Case, FoundRule, decode_case, encode_case, load_case, save_case
from kvsan.ci.transfer_faults import TRANSFER_FAULTS
from kvsan.ci.transfer_judging import judge_transfer
from kvsan.ci.transfer_minima import pair_key, pair_size
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import INDEX_KEY, SidePlane
from kvsan.model.spec import AttentionLayer, CacheSpec, ParallelLayout
from kvsan.sim.transfer.pair import Pair

CASES = Path(__file__).parents[2] / "examples" / "cases" / "pairs"
CONV = next(fault for fault in TRANSFER_FAULTS if fault.name == "fault:conv-state-as-one")


def saved(folder: Path, pair: Pair = CONV.minimum, allocator: str = CONV.name, rule: str = "record-layout") -> Path:
    found = (FoundRule(rule=rule, message="as it was"),)
    return save_case(Case(allocator=allocator, input=pair, found=found), folder)


def larger(pair: Pair) -> Pair:
    """Return ``pair`` with more layers, tokens and slots on both sides, and an attention-DP rank at the source."""
    layers = (AttentionLayer(kv_heads=4, head_dim=64), *pair.source.layers, *pair.source.layers)
    sides = [
        msgspec.structs.replace(spec, layers=layers, tokens_per_block=4, slots=3)
        for spec in (pair.source, pair.destination)
    ]
    source = msgspec.structs.replace(sides[0], parallel=ParallelLayout(tp=2, attention_dp=True))
    return Pair(source=source, destination=sides[1], source_dp=1)


def test_the_case_of_a_pair_is_canonical_and_comes_back(tmp_path) -> None:
    pair = msgspec.structs.replace(larger(CONV.minimum), destination_allocator="trtllm-v1")
    path = saved(tmp_path, pair)
    case = load_case(path)
    assert case.input == pair
    assert path.name == case.file_name == f"{case.digest}.json"
    assert encode_case(decode_case(path.read_bytes())) == path.read_bytes()
    assert saved(tmp_path, larger(CONV.minimum)).name != path.name


def test_a_pair_never_names_code(tmp_path) -> None:
    path = saved(tmp_path)
    text = path.read_bytes().replace(b'"destination_allocator":null', b'"destination_allocator":"os:system"')
    with pytest.raises(SpecError, match="found 'os:system', needs null or the name of an allocator"):
        decode_case(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": {"kvsan": "pair"}}, "Invalid value 'pair'"),
        ({"source_dp": 1}, "source_dp: found 1, needs a whole number from 0 to 0"),
        ({"source_dp": 2**70}, "source_dp: found "),
        ({"destination": None}, "$.input.destination"),
        ({"version": 2}, "$.input.version"),
        ({"more": 1}, "unknown field `more`"),
        ({"source": {"tokens_per_block": 2**40}}, "tokens_per_block: found 1099511627776"),
        ({"source": {"parallel": {"tp": 1024}}}, "found 1024 ranks that hold a request, needs at most 512"),
        ({"source": {"parallel": {"tp": 0}}}, "tp: found 0"),
        ({"source": {"parallel": {"pp": 100}}}, "pp: found 100 pipeline stages for 1 layer"),
        ({"source": {"layers": []}}, "layers: "),
    ],
)
@pytest.mark.parametrize("command", ["peers", "check", "shrink"])
def test_a_hostile_case_is_one_line(run, tmp_path, command: str, change: dict, words: str) -> None:
    document = msgspec.json.decode(saved(tmp_path).read_bytes())
    for field, value in change.items():
        held = document["input"].get(field)
        document["input"][field] = held | value if isinstance(held, dict) and isinstance(value, dict) else value
    path = tmp_path / "hostile.json"
    path.write_bytes(msgspec.json.encode(document))
    ran = run(command, path)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert words in ran.err


def test_fuzz_peers_finds_reduces_and_saves(run, tmp_path) -> None:
    options = ["--peers", "--allocator", "fault:layers-by-position", "--max-examples", "30", "--cases", tmp_path]
    ran = run("fuzz", *options, "--json")
    assert ran.status == 1
    document = ran.document
    first = document["faults"][0]
    assert (first["rule"], document["examples"]) == ("layer-map", 30)
    (fault,) = [fault for fault in TRANSFER_FAULTS if fault.name == "fault:layers-by-position"]
    assert first["size"] == pair_size(load_case(Path(first["case"])).input) == fault.size
    assert document["coverage"]["verdicts"]["findings"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {Path(found["case"]).name for found in document["faults"]}
    again = run("check", first["case"], "--json").document["case"]
    assert (again["rules"][0], again["still_fails"]) == ("layer-map", True)
    report = run("fuzz", *options).out
    assert "smallest pair:" in report
    assert "saved cases that still fail: " in report


def test_fuzz_peers_of_the_sound_transfer(run, tmp_path) -> None:
    options = ("--peers", "--max-examples", "20", "--seed", "1", "--cases", tmp_path / "new")
    ran = run("fuzz", *options, "--allocator", "transfer")
    assert (ran.status, ran.err) == (0, "")
    assert "no rule is broken outside known limits" in ran.out
    assert not (tmp_path / "new").exists()
    alone, together = (run("fuzz", *options, "--allocator", "trtllm-v1", "--workers", n, "--json") for n in "12")
    for ran in (alone, together):
        assert ran.document.pop("seconds") > 0
    assert alone.document["coverage"] == together.document["coverage"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--allocator", CONV.name), f"--allocator: {CONV.name} is a fault of transfers: add --peers"),
        (("--allocator", "fault:free-at-output", "--peers"), "fault:free-at-output is a fault of running caches"),
        (("--allocator", "fault:nothing", "--peers"), "--allocator: unknown fault 'fault:nothing'"),
        (("--allocator", "nobody", "--peers"), "--allocator: unknown allocator 'nobody'"),
        (("--allocator", "transfer", "--peers", "--traces"), "--peers: found together with --traces"),
        (("--allocator", "trtllm-v2", "--refusals", "x"), "--refusals: found without --peers, needs it"),
    ],
)
def test_what_cannot_be_fuzzed_is_one_line(run, tmp_path, options: tuple[str, ...], line: str) -> None:
    ran = run("fuzz", *options, "--max-examples", "1", "--cases", tmp_path)
    assert (ran.status, ran.out) == (2, "")
    assert line in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("command", ["check", "peers"])
def test_a_saved_pair_is_judged_again(run, tmp_path, command: str) -> None:
    path = saved(tmp_path)
    ran = run(command, path, "--json")
    document = ran.document
    assert (ran.status, document["status"], document["transfer"]) == (1, "findings", CONV.name)
    assert document["case"] == {
        "path": str(path),
        "rules": ["record-layout"],
        "rules_now": ["record-layout"],
        "still_fails": True,
    }
    assert "The case still breaks record-layout." in run(command, path).out
    sound = run(command, path, "--allocator", "transfer")
    assert (sound.status, sound.err) == (0, "")
    assert "The case no longer breaks record-layout." in sound.out
    for option in ("--kv-dtype", "--draft"):
        ran = run(command, path, option, "none" if option == "--draft" else "fp8")
        assert (ran.status, ran.out) == (2, "")
        assert f"{option}: the case is a pair" in ran.err


def test_shrink_a_pair(run, tmp_path) -> None:
    path = saved(tmp_path, larger(CONV.minimum))
    ran = run("shrink", path, "--json")
    assert (ran.status, ran.document["rule"], ran.document["interrupted"]) == (1, "record-layout", False)
    small = msgspec.convert(ran.document["pair"], Pair)
    assert pair_key(small) <= pair_key(CONV.minimum)
    assert (ran.document["size"], ran.document["size_before"]) == (CONV.size, pair_size(larger(CONV.minimum)))
    assert load_case(Path(ran.document["case"])).input == small
    report = run("shrink", ran.document["case"]).out
    assert f"already minimal, size {CONV.size}" in report
    assert "destination: KV bf16, 1 token per block, tp2" in report
    clean = run("shrink", path, "--allocator", "transfer", "--json")
    assert (clean.status, clean.document["rule"], clean.document["pair"]) == (0, None, None)
    wrong = run("shrink", path, "--rule", "alias")
    assert (wrong.status, wrong.out) == (2, "")
    assert "does not break 'alias' on this case, it breaks record-layout" in wrong.err


def test_a_refused_pair_is_saved_and_keeps_its_reason(run, reference, tmp_path) -> None:
    options = ("--src", "tp1pp5", "--dst", "tp1", "--kv-dtype", "fp8", "--tokens-per-block", "4", "--save", tmp_path)
    path = run("peers", reference, *options, "--json").document["case"]
    assert f"Saved as {path}" in run("peers", reference, *options).out.replace("\n", "")
    again = run("check", path, "--json").document
    assert (again["status"], again["case"]["still_fails"], len(again["findings"])) == ("refused", True, 5)
    clean = run("peers", reference, "--src", "tp1", "--dst", "tp1", "--tokens-per-block", "1", "--save", tmp_path)
    assert (clean.status, [str(each) for each in tmp_path.iterdir()]) == (0, [path])


def test_two_allocators_are_saved_with_the_pair(run, reference, tmp_path) -> None:
    options = ("--allocator", "trtllm-v2-qsa-legacy", "--dst-allocator", "trtllm-v2-qsa-packed", "--save", tmp_path)
    told = run("peers", reference, "--src", "tp1", "--dst", "tp1", "--kv-dtype", "fp8", *options, "--json").document
    case = load_case(Path(told["case"]))
    assert case.allocator == "trtllm-v2-qsa-legacy"
    assert (case.input.source_allocator, case.input.destination_allocator) == (None, "trtllm-v2-qsa-packed")
    again = run("check", told["case"], "--json").document
    assert (again["status"], again["findings"]) == (told["status"], told["findings"])


@pytest.mark.parametrize(
    ("name", "words", "size"),
    [
        ("packed-plane-over-stages.json", "the packed side_planes differ", 16),
        ("rank-local-packing.json", "none of it for these layers but side_planes", 8),
    ],
)
def test_the_shipped_pairs_are_the_minima_that_are_told(run, tmp_path, name: str, words: str, size: int) -> None:
    """The two limitations of docs/findings.md, as cases."""
    ran = run("check", CASES / name, "--json")
    assert (ran.status, ran.document["status"], ran.document["case"]["still_fails"]) == (1, "refused", True)
    assert words in ran.document["findings"][0]["message"]
    ran = run("shrink", CASES / name, "--output", tmp_path, "--json")
    assert (ran.document["size"], ran.document["size_before"]) == (size, size)


def test_replay_says_where_pairs_are_replayed(run, tmp_path) -> None:
    ran = run("replay", saved(tmp_path))
    assert (ran.status, ran.out) == (2, "")
    assert "the case of a pair of deployments, use: kvsan peers CASE --replay" in ran.err


def test_the_plugin_judges_pairs(tmp_path) -> None:
    from kvsan.ci.plugin_items import faults_of_case, spelled_input

    case = load_case(saved(tmp_path))
    assert {fault.rule for fault in faults_of_case(case, case.allocator)} == {"record-layout"}
    assert faults_of_case(case, "transfer") == []
    assert spelled_input(case).startswith("pair: source: KV bf16, 1 token per block, tp1")


def test_a_known_limit_of_a_later_stage_excuses() -> None:
    """Found among 50,000 pairs: the second stage alone has the layers that the packed policy cannot place."""
    plane = SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16)
    sparse = AttentionLayer(kv_heads=1, head_dim=128, side_planes=(plane,))
    plain = AttentionLayer(kv_heads=1, head_dim=128)
    spec = CacheSpec(
        layers=(plain, sparse, plain), tokens_per_block=1, parallel=ParallelLayout(pp=2, pp_partition=(1, 2))
    )
    judged = judge_transfer(Pair(source=spec, destination=spec), "trtllm-v2-qsa-packed")
    assert judged.verdict.status == "rejected"
    assert judged.rules == ["rejected"]
    assert judged.outside() == ()
    legacy = judge_transfer(Pair(source=spec, destination=spec), "trtllm-v2-qsa-legacy")
    assert [fault.rule for fault in legacy.outside()] == ["rejected"], "no limit excuses the policy before it"
