"""The devices of these tests. Triton interprets or compiles, once for a process: GPU tests run by ``pytest -m gpu``."""

from __future__ import annotations

import importlib.util

import pytest

from kvsan.kernels.device import Device, open_device
from kvsan.model.errors import SpecError


def opened(kind: str) -> Device:
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    try:
        return open_device(kind)
    except SpecError as error:
        if "after a replay on" in str(error):
            pytest.skip(
                f"{kind} needs a process of its own: run the GPU tests with -m gpu, the others with -m 'not gpu'"
            )
        raise


@pytest.fixture(scope="session")
def host() -> Device:
    return opened("cpu")


@pytest.fixture(scope="session")
def gpu() -> Device:
    return opened("cuda")
