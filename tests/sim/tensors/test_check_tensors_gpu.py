"""``check_tensors`` on tensors of torch and CuPy in the memory of one GPU."""

from __future__ import annotations

from typing import Any

import pytest

import kvsan

pytestmark = pytest.mark.gpu


def views() -> dict[str, Any]:
    """Return K and V of four layers interleaved in one CUDA allocation, V seen through CuPy."""
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    store = torch.zeros((6, 4, 2, 8, 64), dtype=torch.float16, device="cuda")
    keys = {f"layers.{layer}.key": store[:, layer, 0] for layer in range(4)}
    return keys | {f"layers.{layer}.value": cupy.asarray(store[:, layer, 1]) for layer in range(4)}


def test_torch_and_cupy_views_of_one_allocation_are_told_apart() -> None:
    assert kvsan.check_tensors(views(), contract=kvsan.TensorContract(alignment_bytes=16)) == []


def test_torch_and_cupy_views_of_the_same_bytes_alias() -> None:
    import cupy

    mine = views()
    twin = cupy.asarray(mine["layers.2.key"])[5, 7, 60:]
    (found,) = kvsan.check_tensors({**mine, "twin": twin})
    assert found.rule == "alias"
    assert [where.tensor for where in found.where] == ["layers.2.key", "twin"]
    assert "element (5, 7, 60) of layers.2.key and element (0,) of twin" in found.message
    assert "cuda:0" in found.message


def test_a_cupy_view_beyond_its_allocation_is_out_of_bounds() -> None:
    import cupy

    pool = cupy.cuda.Memory(4096)
    array = cupy.ndarray((3000,), dtype=cupy.float16, memptr=cupy.cuda.MemoryPointer(pool, 0))
    (found,) = kvsan.check_tensors({"k": array})
    assert "reaches bytes 0 to 6000 of a storage of 4096 B" in found.message
