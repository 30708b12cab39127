"""The reference deployment: 48 layers, of which every fourth has sparse attention and the others are recurrent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Draft

INDEX = SidePlane(role="index_key", dim=128, format=ElementFormat.BF16)
POSITION = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
SPARSE = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(INDEX, POSITION))
GDN = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128)


@pytest.fixture(scope="session")
def reference() -> Callable[..., CacheSpec]:
    """Return a function from a parallel layout's name, a KV format's name, a rank and a draft mode to the spec."""

    def spec(layout: str, kv_format: str, rank: int = 0, draft: str = "none", **settings: Any) -> CacheSpec:
        drafts = Draft(mode=draft, layers=(SPARSE,)) if draft != "none" else Draft()  # type: ignore[arg-type]
        return CacheSpec(
            layers=tuple(SPARSE if index % 4 == 3 else GDN for index in range(48)),
            kv_format=ElementFormat(kv_format),
            state_format=ElementFormat.FP32,
            parallel=ParallelLayout.parse(layout),
            rank=rank,
            draft=drafts,
            sparse_algorithm="qsa",
            **settings,
        )

    return spec
