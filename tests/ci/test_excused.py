"""A known limit excuses what it explains: its rule and its words, in specs, traces, pairs and sweeps alike."""

from __future__ import annotations

import msgspec
import pytest

from kvsan.ci import sweep, transfer_judging
from kvsan.ci.faults import fault_named
from kvsan.ci.sweep import Grid
from kvsan.ci.traces import judging
from kvsan.ci.traces.judging import judge_trace
from kvsan.ci.transfer_judging import judge_transfer
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import INDEX_KEY, AttentionLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec
from kvsan.sim.limits import KnownLimit
from kvsan.sim.transfer.pair import Pair

OTHER = "what no finding says"


def limit(rule: str, words: str) -> KnownLimit:
    return KnownLimit("a limit", ("x",), (rule,), lambda spec: True, "", b"", (words,))


@pytest.mark.parametrize(("words", "count"), [("", 0), (OTHER, 1)])
def test_a_trace(monkeypatch: pytest.MonkeyPatch, words: str, count: int) -> None:
    fault = fault_named("fault:free-at-output")
    monkeypatch.setattr(judging, "limits_of", lambda name: (limit(fault.rules[0], words),))
    judged = judge_trace(fault.trace, fault.name)
    assert len(judged.faults) == 1
    assert (len(judged.outside), len(judged.excused)) == (count, 1 - count)


@pytest.mark.parametrize(("words", "count"), [("", 0), (OTHER, 1)])
def test_a_pair(monkeypatch: pytest.MonkeyPatch, words: str, count: int) -> None:
    plane = SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16)
    layers = (
        AttentionLayer(kv_heads=1, head_dim=128, side_planes=(plane,)),
        AttentionLayer(kv_heads=1, head_dim=128),
    )
    spec = CacheSpec(layers=layers, tokens_per_block=1, parallel=ParallelLayout())
    monkeypatch.setattr(transfer_judging, "limits_of", lambda name: (limit("rejected", words),))
    judged = judge_transfer(Pair(source=spec, destination=spec), "trtllm-v2-qsa-legacy")
    assert judged.verdict.status == "rejected"
    assert (len(judged.outside()), len(judged.excused)) == (count, 1 - count)


@pytest.mark.parametrize(("words", "count"), [("", 0), (OTHER, 1)])
def test_a_sweep(monkeypatch: pytest.MonkeyPatch, words: str, count: int) -> None:
    grid = Grid(heads=1, head_dims=(64,), tokens_per_block=(1,), tp=(1,), sparse_layers=(2,), index_dims=(64,))
    grid = msgspec.structs.replace(grid, kv_formats=grid.kv_formats[:1])
    monkeypatch.setattr(sweep, "limits_of", lambda name: (limit("rejected", words),))
    assert len(sweep.sweep("trtllm-v2-qsa-legacy", grid).classes) == count
