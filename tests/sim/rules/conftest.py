"""Small sound layouts of every kind, a way to change one number in one, and one rule's answer about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, HybridLayer, LatentLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Draft
from kvsan.sim.checking import check
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rules import RULES

BF16, FP8, NVFP4 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4
INDEX = SidePlane(role="index_key", dim=128, format=BF16)
POSITION = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
SPARSE = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(INDEX, POSITION))
GDN = RecurrentLayer(algorithm="gdn", heads=8, head_dim=16, groups=4, state_dim=16)
DENSE = AttentionLayer(kv_heads=2, head_dim=32)
LATENT_INDEX = SidePlane(role="index_key", dim=20, format=ElementFormat.UINT8)


def _sparse(layers: int, **settings: Any) -> CacheSpec:
    pattern = (GDN, SPARSE)
    return CacheSpec(
        layers=tuple(pattern[index % 2] for index in range(layers)),
        slots=3,
        state_slots=2,
        sparse_algorithm="qsa",
        **settings,
    )


def _plain(*layers: Any, **settings: Any) -> CacheSpec:
    return CacheSpec(layers=layers, tokens_per_block=4, slots=3, **settings)


SOUND: dict[str, tuple[CacheSpec, str]] = {
    "v1-windows": (
        _plain(
            DENSE, AttentionLayer(kv_heads=4, head_dim=32, window=64), DENSE, AttentionLayer(kv_heads=4, head_dim=32)
        ),
        "trtllm-v1",
    ),
    "v1-nvfp4": (_plain(DENSE, DENSE, DENSE, kv_format=NVFP4), "trtllm-v1"),
    "v1-latent": (_plain(*(LatentLayer(latent_dim=32, rope_dim=16, side_planes=(LATENT_INDEX,)),) * 2), "trtllm-v1"),
    "v1-hybrid": (_plain(GDN, DENSE, GDN, DENSE, state_slots=2), "trtllm-v1"),
    "v2-dense": (_plain(DENSE, DENSE, DENSE), "trtllm-v2"),
    "v2-windows": (_plain(*(DENSE, AttentionLayer(kv_heads=2, head_dim=32, window=8, sink_tokens=4)) * 2), "trtllm-v2"),
    "v2-per-layer": (_plain(*(DENSE, AttentionLayer(kv_heads=4, head_dim=32)) * 2), "trtllm-v2"),
    "v2-latent": (_plain(*(LatentLayer(latent_dim=32, rope_dim=16, side_planes=(LATENT_INDEX,)),) * 3), "trtllm-v2"),
    "v2-nvfp4": (_plain(DENSE, DENSE, DENSE, kv_format=NVFP4), "trtllm-v2"),
    "v2-expanded": (_plain(*(AttentionLayer(kv_heads=2, head_dim=32, tokens_per_block=2),) * 3), "trtllm-v2"),
    "v2-halves": (_plain(*(HybridLayer(attention=DENSE, recurrent=GDN),) * 2), "trtllm-v2"),
    "v2-draft": (
        _plain(DENSE, DENSE, draft=Draft(mode="separate", layers=(AttentionLayer(kv_heads=1, head_dim=16),))),
        "trtllm-v2",
    ),
    "legacy-bf16": (_sparse(4), "trtllm-v2-qsa-legacy"),
    "packed-bf16": (_sparse(4), "trtllm-v2-qsa-packed"),
    "packed-fp8": (_sparse(4, kv_format=FP8, parallel=ParallelLayout(tp=2)), "trtllm-v2-qsa-packed"),
    "packed-nvfp4": (_sparse(4, kv_format=NVFP4), "trtllm-v2-qsa-packed"),
    "packed-pipeline": (_sparse(8, kv_format=FP8, parallel=ParallelLayout(tp=2, pp=2), rank=3), "trtllm-v2-qsa-packed"),
}
"""Specs by name, each with the allocator that lays it out; every layout has at least two slots per life cycle."""

_LAYOUTS: dict[str, Layout] = {}


def _layout(name: str) -> Layout:
    if name not in _LAYOUTS:
        _LAYOUTS[name] = allocate(*SOUND[name])
    return _LAYOUTS[name]


@pytest.fixture(scope="session")
def sound() -> Mapping[str, Layout]:
    """Return the sound layouts by name."""
    return {name: _layout(name) for name in SOUND}


@pytest.fixture(params=sorted(SOUND))
def sound_layout(request: pytest.FixtureRequest) -> Layout:
    """Return each sound layout in turn."""
    return _layout(request.param)


@pytest.fixture(scope="session")
def change() -> Callable[..., Layout]:
    """Return a function that changes fields of one member: ``change(layout, "buffers", 3, offset_bytes=0)``."""

    def changed(layout: Layout, field: str, index: int, /, **values: Any) -> Layout:
        members = list(getattr(layout, field))
        members[index] = msgspec.structs.replace(members[index], **values)
        return msgspec.structs.replace(layout, **{field: tuple(members)})

    return changed


@pytest.fixture(scope="session")
def found() -> Callable[[str, Layout], list[Finding]]:
    """Return a function that asks one rule, by name, about a layout."""

    def asked(rule: str, layout: Layout) -> list[Finding]:
        findings = check(layout, rules=tuple(known for known in RULES if known.name == rule))
        assert all(finding.rule == rule and finding.remedy and "\n" not in finding.message for finding in findings)
        return findings

    return asked


@pytest.fixture(scope="session")
def place() -> Callable[..., int]:
    """Return a function that finds a buffer or an access: ``place(layout, layer, role, consumer=None)``."""

    def placed(layout: Layout, layer: int, role: str, consumer: str | None = None) -> int:
        at = next(i for i, held in enumerate(layout.buffers) if (held.layer, held.role) == (layer, role))
        if consumer is None:
            return at
        return next(i for i, reach in enumerate(layout.accesses) if (reach.buffer, reach.consumer) == (at, consumer))

    return placed
