"""The testbed with its bytes on a GPU: K and V through compiled kernels, and the tokens of a contiguous cache."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:  # importing it here would settle too early that kernels are compiled
    pytest.skip("triton is not installed", allow_module_level=True)

from kvsan.kernels.device import Device  # noqa: E402
from kvsan.kernels.testbed.contiguous import ContiguousStore  # noqa: E402
from kvsan.kernels.testbed.deployment import Deployment  # noqa: E402
from kvsan.kernels.testbed.generation import beam_search, greedy, prompt  # noqa: E402
from kvsan.kernels.testbed.model import HybridModel  # noqa: E402
from kvsan.kernels.testbed.store import Store  # noqa: E402
from kvsan.model.formats import ElementFormat  # noqa: E402
from kvsan.model.layers import AttentionLayer, RecurrentLayer  # noqa: E402
from kvsan.model.parallel import ParallelLayout  # noqa: E402
from kvsan.model.spec import CacheSpec  # noqa: E402
from kvsan.sim.cache.trace import Operation  # noqa: E402

pytestmark = pytest.mark.gpu

GDN = RecurrentLayer(algorithm="gdn", heads=4, head_dim=4, groups=2, state_dim=4)
FULL = AttentionLayer(kv_heads=2, head_dim=16)
WINDOW = AttentionLayer(kv_heads=2, head_dim=16, window=5)


def spec_of(kv_format: str, parallel: str) -> CacheSpec:
    return CacheSpec(
        layers=(FULL, GDN, WINDOW),
        tokens_per_block=4,
        kv_format=ElementFormat(kv_format),
        slots=60,
        parallel=ParallelLayout.parse(parallel),
    )


def everything(spec: CacheSpec, store: Store) -> list[Any]:
    """Beam search, then a prompt that is published and one that reuses it, beside one that does not."""
    model = HybridModel(spec)
    found: list[Any] = [beam_search(model, store, prompt(0, 11), 6)]
    store.apply(Operation("free", 0))
    found.append(greedy(model, store, {1: prompt(0, 12)}, 4, between={1: [Operation("commit", 1)]}))
    found.append(greedy(model, store, {2: prompt(0, 14), 3: prompt(5, 9)}, 4, texts={3: 5}))
    return found


@functools.cache
def on_a_contiguous_cache(kv_format: str) -> list[Any]:
    spec = spec_of(kv_format, "tp1")
    return everything(spec, ContiguousStore(spec))


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp32", "fp8", "nvfp4"])
@pytest.mark.parametrize(
    ("allocator", "parallel"), [("trtllm-v2", "tp1"), ("trtllm-v1", "tp1"), ("trtllm-v2-qsa-packed", "tp2")]
)
def test_tokens_and_logits_are_those_of_a_contiguous_cache(gpu: Device, allocator, parallel, kv_format) -> None:
    from kvsan.kernels.testbed.triton_paged import TritonMemory

    spec = spec_of(kv_format, parallel)
    deployment = Deployment(spec, allocator, memory=TritonMemory, device="cuda")
    assert everything(spec, deployment) == on_a_contiguous_cache(kv_format)
    assert deployment.findings == ()
    launches = [memory.launches for memory in deployment.ranks if isinstance(memory, TritonMemory)]
    assert all((count > 0) == (kv_format != "nvfp4") for count in launches)
    again = Deployment(spec, allocator, memory=TritonMemory, device="cuda")
    assert everything(spec, again) == on_a_contiguous_cache(kv_format)
