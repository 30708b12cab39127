"""``kvsan replay --device cuda``: a device that really crashes, and the same answers as on the host."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.replay import supervisor
from kvsan.kernels.device import require_interpreter
from kvsan.model.errors import SpecError
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec, encode_spec
from kvsan.sim.arena import Arena
from kvsan.sim.registry import allocate

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SOUND = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),), tokens_per_block=2, slots=2)


def test_an_illegal_address_is_put_down_to_its_case(run, tmp_path, monkeypatch) -> None:
    """A kernel writes to address 16: the context is lost, the case is named, and the others are replayed."""
    fake = ROOT / "tests" / "ci" / "replay" / "fake_child.py"
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-P", str(fake), str(tmp_path)))
    (tmp_path / "real").touch()
    files = [tmp_path / f"{place}.json" for place in range(4)]
    for file, model in zip(files, ("first", "poke", "second", "last"), strict=True):
        file.write_bytes(encode_spec(msgspec.structs.replace(SOUND, model=model)))
    ran = run("replay", *files, "--device", "cuda", "--json")
    assert ran.status == 1
    assert [entry["status"] for entry in ran.document["cases"]] == ["clean", "crashed", "clean", "clean"]
    assert "illegal" in ran.document["cases"][1]["findings"][0]["message"].lower()
    assert {entry["digest"] for entry in ran.document["cases"]} == {None, Arena.build(allocate(SOUND)).digest()}


def test_the_same_verdicts_and_digests_on_both_devices(run) -> None:
    try:
        require_interpreter(version("triton"), version("numpy"))
    except SpecError as error:
        pytest.skip(str(error))
    cases = ROOT / "examples" / "cases"
    on_host, on_gpu = (run("replay", cases, "--device", device, "--json") for device in ("cpu", "cuda"))
    assert on_host.status == on_gpu.status == 1
    assert on_gpu.document["cases"] == on_host.document["cases"]
    assert "cupy" in on_gpu.document["versions"]


def test_many_cases_share_a_child(run, tmp_path) -> None:
    for number in range(600):
        spec = msgspec.structs.replace(SOUND, slots=1 + number % 7)
        (tmp_path / f"{number:04}.json").write_bytes(encode_spec(spec))
    ran = run("replay", tmp_path, "--device", "cuda", "--json")
    assert ran.status == 0
    assert ran.document["summary"]["clean"] == 600
