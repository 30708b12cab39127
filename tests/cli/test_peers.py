"""``kvsan peers``: one pair, the matrix, and every line of bad input."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvsan.sim.transfer.execution import execute
from kvsan.sim.transfer.plan import ByteCopy

FIVE = ("tp1", "tp2", "tep4", "adp2", "adp4")


def test_a_pair_that_fits_is_exit_0(run, reference) -> None:
    ran = run("peers", reference, "--src", "tp1", "--dst", "tep4", "--kv-dtype", "fp8", "--tokens-per-block", "4")
    assert (ran.status, ran.err) == (0, "")
    assert "every byte arrives once" in ran.out
    assert "676 copies" in ran.out


def test_the_document_holds_what_an_executor_needs(run, reference) -> None:
    options = ("--src", "tep4", "--dst", "adp2", "--dst-dp", "1", "--kv-dtype", "fp8", "--tokens-per-block", "4")
    document = run("peers", reference, *options, "--json").document
    assert list(document) == ["status", "source", "destination", "bytes", "copies", "findings", "rejection"]
    assert (document["status"], document["findings"], document["rejection"]) == ("clean", [], None)
    assert [rank["rank"] for rank in document["source"]["ranks"]] == [0, 1, 2, 3]
    assert [rank["rank"] for rank in document["destination"]["ranks"]] == [1]
    assert document["destination"]["dp"] == 1
    stored = sum(
        entry["size_bytes"] for view in document["destination"]["ranks"][0]["views"] for entry in view["entries"]
    )
    assert document["bytes"] == stored
    copy = document["copies"][0]
    run_bytes = copy["run_bytes"]
    absolute = ByteCopy(0, 0, copy["source_offset"], 1, 0, copy["destination_offset"], run_bytes, (), (), ())
    source = {(0, 0): np.arange(copy["source_offset"] + run_bytes, dtype=np.uint8)}
    target = {(1, 0): np.zeros(copy["destination_offset"] + run_bytes, dtype=np.uint8)}
    assert execute([absolute], source, target) == run_bytes
    assert np.array_equal(target[1, 0][copy["destination_offset"] :], source[0, 0][copy["source_offset"] :])


def test_a_refusal_is_exit_1_with_the_reason(run, reference) -> None:
    options = ("--src", "tp1pp5", "--dst", "tp1", "--kv-dtype", "fp8")
    ran = run("peers", reference, *options)
    assert (ran.status, ran.err) == (1, "")
    assert "do not fit" in ran.out
    assert "16768 B" in ran.out
    assert "98688 B" in ran.out
    document = run("peers", reference, *options, "--json").document
    assert (document["status"], document["copies"], len(document["findings"])) == ("refused", [], 5)


def test_an_allocator_that_refuses_is_exit_1(run, reference) -> None:
    options = ("--src", "tp1", "--dst", "tp2", "--kv-dtype", "fp8", "--allocator", "trtllm-v2-qsa-legacy")
    document = run("peers", reference, *options, "--json").document
    assert document["status"] == "rejected"
    assert document["rejection"]["side"] == "destination"
    assert "24576" in document["rejection"]["message"]


def test_a_faulty_transfer_is_exit_1_with_its_rule(run, reference) -> None:
    options = ("--src", "tp1", "--dst", "tp2", "--tokens-per-block", "4", "--transfer", "fault:conv-state-as-one")
    ran = run("peers", reference, *options, "--json")
    assert ran.status == 1
    assert {finding["rule"] for finding in ran.document["findings"]} == {"record-layout"}
    assert "bytes arrive wrong" in run("peers", reference, *options).out


def test_the_two_sides_may_be_two_files_and_two_allocators(run, reference, tmp_path) -> None:
    from kvsan.model.loading import load
    from kvsan.model.spec import encode_spec

    spec = load(reference, layout="tp2", kv_dtype="fp8", tokens_per_block=4)
    (tmp_path / "decode.json").write_bytes(encode_spec(spec))
    options = ("--src", "tp1", "--kv-dtype", "fp8", "--tokens-per-block", "4")
    document = run("peers", reference, tmp_path / "decode.json", *options, "--json").document
    assert document["status"] == "clean"
    assert document["destination"]["layout"] == "tp2"
    legacy = ("--allocator", "trtllm-v2-qsa-legacy", "--dst-allocator", "trtllm-v2-qsa-packed")
    mixed = run("peers", reference, "--src", "tp1", "--dst", "tp1", "--kv-dtype", "fp8", *legacy, "--json").document
    assert mixed["status"] == "refused"
    assert (mixed["source"]["allocator"], mixed["destination"]["allocator"]) == (legacy[1], legacy[3])


def test_the_matrix_of_the_five_layouts(run, reference) -> None:
    options = ("--matrix", "--kv-dtypes", "fp8", "--tokens-per-block", "4")
    ran = run("peers", reference, *options, "--json")
    assert ran.status == 0
    cells = ran.document["cells"]
    assert [(cell["source"], cell["destination"]) for cell in cells] == [(one, two) for one in FIVE for two in FIVE]
    assert {cell["status"] for cell in cells} == {"clean"}
    local = run("peers", reference, *options, "--allocator", "trtllm-v2-qsa-packed-rank-local", "--layouts", "tp1,tp2")
    assert local.status == 1
    assert "4 pairs: 2 clean, 2 refused" in local.out
    assert "side_planes" in local.out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--src", "tq1"), "kvsan: --src: unknown parallel layout 'tq1', needs a name such as tp4, tep4, adp4"),
        (("--dst", "tq1"), "kvsan: --dst: unknown parallel layout 'tq1'"),
        (("--dst-kv-dtype", "int3"), "kvsan: --dst-kv-dtype: found 'int3', needs one of fp32"),
        (("--dst-tokens-per-block", "0"), "kvsan: --dst-tokens-per-block: found 0, needs a whole number from 1"),
        (("--dst-allocator", "nobody"), "kvsan: --dst-allocator: unknown allocator 'nobody'"),
        (("--allocator", "nobody"), "kvsan: --allocator: unknown allocator 'nobody'"),
        (("--dst", "adp2", "--dst-dp", "2"), "kvsan: --dst-dp: found 2, needs a whole number from 0 to 1"),
        (("--src-dp", "x"), "kvsan: --src-dp: found 'x', needs a whole number"),
        (("--src", "tp1024"), "kvsan: --src: found 1024 ranks that hold a request, needs at most 512"),
        (("--src-pp-partition", "1,2"), "kvsan: --src-pp-partition"),
        (("--layouts", "tp1"), "kvsan: --layouts: found without --matrix, needs it"),
        (("--matrix", "--src", "tp1"), "kvsan: --src: found together with --matrix"),
        (("--matrix", "--layouts", "tp1,tq2"), "kvsan: --layouts: unknown parallel layout 'tq2'"),
        (("--transfer", "fault:nothing"), "kvsan: --transfer: unknown transfer 'fault:nothing'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run, reference, options: tuple[str, ...], line: str) -> None:
    if options == ("--src-pp-partition", "1,2"):
        options = ("--src", "tp1pp3", *options)
    ran = run("peers", reference, *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(line)
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("more", [(), ("--processes",), ("--device", "cuda")])
def test_a_replay_without_torch_is_one_line(run, reference, monkeypatch, more: tuple[str, ...]) -> None:
    """Found in a fresh environment, where the package that a replay needs is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("kvsan.kernels.transfers")]:
        monkeypatch.delitem(sys.modules, name)
    ran = run("peers", reference, "--src", "tp1", "--dst", "tp2", "--replay", *more)
    assert (ran.status, ran.out) == (2, "")
    assert "needs the package torch, which is not installed: pip install 'kvsan[kernels]'" in ran.err


def test_a_clean_pair_is_not_saved_and_that_is_said(run, reference, tmp_path) -> None:
    ran = run("peers", reference, "--src", "tp1", "--dst", "tp2", "--save", tmp_path)
    assert (ran.status, list(tmp_path.iterdir())) == (0, [])
    assert "Nothing saved: the pair is clean" in ran.out
