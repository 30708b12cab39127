"""``kvsan replay --kernels``: what kernels compute over saved cases, through the interpreter."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsan.ci.cases import Case, save_case
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, RecurrentLayer, SidePlane
from kvsan.model.spec import CacheSpec, encode_spec

PLANES = (
    SidePlane(role="index_key", dim=16, format=ElementFormat.BF16),
    SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank"),
)
QSA = AttentionLayer(kv_heads=2, head_dim=16, side_planes=PLANES)
GDN = RecurrentLayer(algorithm="gdn", heads=2, head_dim=8, groups=2, state_dim=8)
HYBRID = CacheSpec(
    layers=(GDN, QSA, QSA), kv_format=ElementFormat.FP8, tokens_per_block=2, slots=2, sparse_algorithm="qsa"
)
"""Index keys are as large as K pages here."""

needs_engine = pytest.mark.skipif(
    sys.platform != "linux" or any(importlib.util.find_spec(name) is None for name in ("torch", "triton")),
    reason="needs torch and Triton, which is for Linux",
)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of a sound layout and of one whose offsets are floored, by file name."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "sound.json").write_bytes(encode_spec(HYBRID))
    faulty = Case(allocator="fault:coalesce-by-size", input=HYBRID)
    shutil.move(save_case(faulty, folder), folder / "faulty.json")
    command = [sys.executable, "-W", "ignore", "-m", "kvsan", "replay", str(folder), "--kernels", "all", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    return {Path(entry["case"]).name: entry for entry in json.loads(done.stdout)["cases"]}


@needs_engine
def test_a_sound_layout_answers_as_the_reference(entries) -> None:
    entry = entries["sound.json"]
    assert (entry["status"], entry["findings"]) == ("clean", [])
    assert not [note for note in entry["notes"] if "kernel" in note]
    assert len(entry["digest"]) == 32


@needs_engine
def test_a_wrong_address_is_named_with_the_answer_that_it_spoils(entries) -> None:
    found = [finding for finding in entries["faulty.json"]["findings"] if finding["rule"] == "kernel-result"]
    attention = [finding["message"] for finding in found if "decode attention" in finding["message"]]
    assert attention, "attention reads what another consumer wrote"
    for words in (
        "layer 2's",
        "request 0, query head",
        "the reference says",
        "position",
        "was written",
        "computes byte",
    ):
        assert words in attention[0]
    read_back = [finding["message"] for finding in found if "read back: request 0, position" in finding["message"]]
    assert read_back
    assert {finding["where"][0]["consumer"] for finding in found} >= {"attention-op"}


def test_a_kernel_that_is_not_there_is_one_line(tmp_path) -> None:
    (tmp_path / "sound.json").write_bytes(encode_spec(HYBRID))
    command = [sys.executable, "-m", "kvsan", "replay", str(tmp_path), "--kernels", "everything"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--kernels" in line
    assert "needs one of all, attention, skip-softmax, sparse, state, quantize" in line
