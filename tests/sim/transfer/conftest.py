"""Small deployments for the tests of transfers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvsan.model.loading import load
from kvsan.model.spec import CacheSpec

Deploy = Callable[..., CacheSpec]


@pytest.fixture(scope="session")
def deploy(root: Path) -> Deploy:
    """Return a function that deploys the reference model under a parallel layout's name."""
    config = root / "examples" / "qwen3.8-flash-next" / "config.json"

    def deployed(layout: str, kv_dtype: str = "fp8", **options: object) -> CacheSpec:
        return load(config, layout=layout, kv_dtype=kv_dtype, **options)  # type: ignore[arg-type]

    return deployed
