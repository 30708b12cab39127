"""Layouts of installed engines on a GPU, from answers that they gave where they were installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvsan.kernels.device import Device
from kvsan.kernels.replay import Replayer
from kvsan.model.spec import decode_spec
from kvsan.sim.arena import Arena
from kvsan.sim.checking import check
from kvsan.sim.engines import sglang, vllm
from kvsan.sim.engines.answer import read_answer
from kvsan.sim.layout import Layout

ANSWERS = Path(__file__).parents[1] / "sim" / "engines"
SGLANG = json.loads((ANSWERS / "sglang_answers.json").read_text(encoding="utf-8"))
LARGE = json.loads((ANSWERS / "vllm_large_answers.json").read_text(encoding="utf-8"))
"""vLLM 0.33.0 on two layers in 5 GiB: tests/ci/engines records answers like it where the engine is installed."""


def of_sglang(entry: dict[str, Any]) -> Layout:
    spec = decode_spec(json.dumps(entry["spec"]).encode())
    return sglang.layout_of(spec, read_answer(entry["answer"], "SGLang"), entry["allocator"], "SGLang")


def of_vllm(entry: dict[str, Any]) -> Layout:
    spec = decode_spec(json.dumps(entry["spec"]).encode())
    return vllm.layout_of(
        spec, read_answer(entry["answer"], entry["engine"]), entry["allocator"], entry["order"], entry["engine"]
    )


@pytest.mark.parametrize("entry", LARGE, ids=[entry["allocator"] for entry in LARGE])
def test_the_large_answers_reach_past_32_bits(entry: dict[str, Any]) -> None:
    layout = of_vllm(entry)
    assert check(layout) == []
    elements = [access.offset_bytes + (access.cell_count - 1) * access.pitch_bytes for access in layout.accesses]
    assert max(elements) > 1 << 32


@pytest.mark.gpu
@pytest.mark.parametrize("entry", LARGE, ids=[entry["allocator"] for entry in LARGE])
def test_a_layout_past_32_bits_replays_clean(gpu: Device, entry: dict[str, Any]) -> None:
    (replayed,) = Replayer(gpu, max_bytes=1 << 40).replay([of_vllm(entry)])
    assert replayed.findings == ()


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(SGLANG)))
def test_sglangs_layouts_replay_as_on_paper(gpu: Device, number: int) -> None:
    layout = of_sglang(SGLANG[number])
    (replayed,) = Replayer(gpu, max_bytes=1 << 40).replay([layout])
    arena = Arena.build(layout)
    assert replayed.findings == ()
    assert replayed.digest == arena.digest()
