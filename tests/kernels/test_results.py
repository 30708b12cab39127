"""Kernels over whole layouts: silent on sound ones, and faults show as wrong answers, lost keys and shrunk shapes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:  # importing it here would settle too early that kernels are compiled
    pytest.skip("triton is not installed", allow_module_level=True)

from kvsan.kernels.device import Device, open_device  # noqa: E402
from kvsan.model.formats import ElementFormat  # noqa: E402
from kvsan.model.layers import LatentLayer, RecurrentLayer, SidePlane  # noqa: E402
from kvsan.model.spec import AttentionLayer, CacheSpec  # noqa: E402
from kvsan.sim.registry import allocate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, on rows that see nothing

GDN = RecurrentLayer(algorithm="gdn", heads=2, head_dim=8, groups=2, state_dim=8)
PLANES = (
    SidePlane(role="index_key", dim=16, format=ElementFormat.BF16),
    SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank"),
)
QSA = AttentionLayer(kv_heads=2, head_dim=16, side_planes=PLANES)


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu")


def judged(device: Device, allocator: str, format: ElementFormat, *layers: Any) -> Any:
    from kvsan.kernels.results.judging import judge_kernels

    sparse = "qsa" if QSA in layers else None
    spec = CacheSpec(layers=layers, kv_format=format, tokens_per_block=4, slots=4, sparse_algorithm=sparse)
    return judge_kernels(device, allocate(spec, allocator))


def test_sound_hybrids_have_no_finding(device: Device) -> None:
    report = judged(device, "trtllm-v2-qsa-packed", ElementFormat.FP8, GDN, QSA, GDN, QSA)
    assert report.findings == ()
    assert report.refused == ()
    assert report.layers == 6  # two with K and V, two with states, two with side planes


def test_sound_latent_layers_have_no_finding(device: Device) -> None:
    report = judged(device, "trtllm-v2", ElementFormat.BF16, LatentLayer(latent_dim=32, rope_dim=16))
    assert (report.findings, report.refused, report.layers) == ((), (), 1)


def test_a_floored_offset_spoils_answers(device: Device) -> None:
    """Index keys as large as K pages, and the assertion that would have refused it is gone."""
    report = judged(device, "fault:coalesce-by-size", ElementFormat.FP8, QSA, QSA)
    assert {finding.rule for finding in report.findings} == {"kernel-result"}
    answers = [finding for finding in report.findings if "decode attention" in finding.message]
    assert answers
    assert "request 0, query head" in answers[0].message
    assert "was written; the attention-op computes byte" in answers[0].message
    assert answers[0].where[0].consumer == "attention-op"


def test_swapped_lanes_are_seen_by_the_other_reader(device: Device) -> None:
    """The op writes and reads its own swapped lanes without harm; the tensor view of the cache reads K where V is."""
    report = judged(device, "fault:swap-kv-lanes", ElementFormat.NVFP4, AttentionLayer(kv_heads=2, head_dim=16))
    consumers = {finding.where[0].consumer for finding in report.findings}
    assert consumers == {"kv-view"}


def test_kernels_are_named_or_refused(device: Device) -> None:
    from kvsan.kernels.results.judging import judge_kernels
    from kvsan.model.errors import SpecError

    with pytest.raises(SpecError, match="needs one of all, attention"):
        judge_kernels(device, allocate(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=16),))), "everything")


def test_a_passkey_is_fetched_from_3000_tokens(device: Device) -> None:
    from kvsan.kernels.results.retrieval import find_passkeys, passkey_layout

    layout = passkey_layout("trtllm-v2", ElementFormat.NVFP4, "NHD", 3000, layers=1)
    found = find_passkeys(device, layout, (3000,), (50,))
    assert (found.found, found.planted, found.refused) == (1, 1, ())


@pytest.mark.parametrize("fault", ["fault:scale-is-pairs", "fault:layer-ordinal-off-by-one"])
def test_faulty_layouts_lose_passkeys(device: Device, fault: str) -> None:
    from kvsan.kernels.results.retrieval import find_passkeys, passkey_layout

    found = find_passkeys(device, passkey_layout(fault, ElementFormat.BF16, "HND", 300), (300,), (20,))
    assert found.planted == 3
    assert found.found == 3 - len(found.missed) < 3
    assert all(tokens == 300 and depth == 20 for _, tokens, depth in found.missed)


def test_a_sound_kernel_of_somebody_passes(device: Device, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsan.kernels.trials.kernels import run_trials
    from kvsan.kernels.trials.own import own_trial
    from kvsan.kernels.trials.shape import SMALL

    monkeypatch.chdir((root / "examples" / "your-kernel" / "sound.py").parent)
    found = run_trials(device, own_trial("decode", "sound:decode"), range(10), SMALL, may_refuse=True)
    assert found.failures == ()
    assert 0 < found.refused < found.trials == 10


def test_a_planted_stride_fault_is_found_and_shrinks(root: Path) -> None:
    """What is left of the shape is what the author of ``faulty.py`` forgot: a distance between two tokens."""
    command = [sys.executable, "-W", "ignore", "-m", "kvsan.kernels.trials", "--own", "faulty:decode", "--shrink"]
    folder = (root / "examples" / "your-kernel" / "faulty.py").parent
    done = subprocess.run([*command, "--shapes", "10"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    smallest = json.loads(done.stdout)["kernels"][0]["smallest"]
    assert (smallest["heads"], smallest["head_dim"], smallest["page_tokens"], smallest["lengths"]) == (1, 1, 2, [2])
    assert smallest["row_gap"] + smallest["page_gap"] + smallest["element_step"] == 2, "one gap, and nothing else"


@pytest.mark.parametrize(
    ("own", "needs"),
    [("nothing", "needs module:function"), ("json:nothing", "has no function"), ("no.such:x", "cannot")],
)
def test_own_kernels_that_cannot_be_loaded(device: Device, own: str, needs: str) -> None:
    from kvsan.kernels.trials.own import own_trial
    from kvsan.model.errors import SpecError

    with pytest.raises(SpecError, match=needs):
        own_trial("decode", own)


def test_kernels_are_tried_in_processes_of_their_own() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "kvsan.kernels.trials", "--shapes", "1", "--workers", "2"]
    command += ["--kernel", "conv", "--kernel", "fetch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = json.loads(done.stdout)["kernels"]
    assert [(report["kernel"], report["trials"], report["failures"]) for report in reports] == [
        ("conv", 1, []),
        ("fetch", 1, []),
    ]
