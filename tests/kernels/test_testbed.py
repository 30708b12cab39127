"""The testbed: one tiny model, the same tokens whichever cache it remembers through, and others through a faulty one.

Results are compared with ``==``: tokens, and logits to the last bit.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Final

import msgspec
import pytest

torch = pytest.importorskip("torch")

from kvsan.kernels.reference.numbers import as_stored  # noqa: E402
from kvsan.kernels.testbed.attending import SkipSoftmax, attend  # noqa: E402
from kvsan.kernels.testbed.codec import decode, encode, rounded  # noqa: E402
from kvsan.kernels.testbed.contiguous import ContiguousStore  # noqa: E402
from kvsan.kernels.testbed.deployment import Deployment  # noqa: E402
from kvsan.kernels.testbed.generation import beam_search, greedy, prompt, speculative  # noqa: E402
from kvsan.kernels.testbed.model import HybridModel, Sparse  # noqa: E402
from kvsan.kernels.testbed.store import Store  # noqa: E402
from kvsan.model.errors import SpecError  # noqa: E402
from kvsan.model.formats import ElementFormat  # noqa: E402
from kvsan.model.layers import AttentionLayer, LatentLayer, Layer, RecurrentLayer, SidePlane  # noqa: E402
from kvsan.model.parallel import ParallelLayout  # noqa: E402
from kvsan.model.spec import CacheSpec, Draft  # noqa: E402
from kvsan.sim.cache.refusal import Refused  # noqa: E402
from kvsan.sim.cache.trace import Operation  # noqa: E402
from kvsan.sim.rejection import Rejected  # noqa: E402

GDN: Final = RecurrentLayer(algorithm="gdn", heads=4, head_dim=4, groups=2, state_dim=4)
FULL: Final = AttentionLayer(kv_heads=2, head_dim=16)
WINDOW: Final = AttentionLayer(kv_heads=2, head_dim=16, window=5)
PLANES: Final = (
    SidePlane(role="index_key", dim=16, format=ElementFormat.BF16),
    SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank"),
)
QSA: Final = AttentionLayer(kv_heads=2, head_dim=16, side_planes=PLANES)
FORMATS: Final = ("bf16", "fp16", "fp32", "fp8", "nvfp4")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    yield
    torch.set_num_threads(before)


def spec_of(*layers: Layer, kv_format: str = "bf16", **rest: Any) -> CacheSpec:
    rest.setdefault("slots", 60)
    sparse = "qsa" if QSA in layers else None
    format = ElementFormat(kv_format)
    return CacheSpec(layers=layers, tokens_per_block=4, kv_format=format, sparse_algorithm=sparse, **rest)


def in_parallel(spec: CacheSpec, name: str) -> CacheSpec:
    return msgspec.structs.replace(spec, parallel=ParallelLayout.parse(name))


def two_requests(model: HybridModel, store: Store) -> Any:
    return greedy(model, store, {0: prompt(0, 11), 1: prompt(3, 7)}, 6, texts={1: 3})


def everything(model: HybridModel, store: Store) -> list[Any]:
    """Beam search, then a prompt that is published and one that reuses it, beside one that does not."""
    found: list[Any] = [beam_search(model, store, prompt(0, 11), 6)]
    store.apply(Operation("free", 0))
    found.append(greedy(model, store, {1: prompt(0, 12)}, 4, between={1: [Operation("commit", 1)]}))
    found.append(greedy(model, store, {2: prompt(0, 14), 3: prompt(5, 9)}, 4, texts={3: 5}))
    return found


@functools.cache
def on_a_contiguous_cache(spec: CacheSpec) -> list[Any]:
    return everything(HybridModel(spec), ContiguousStore(spec))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_stored_values_are_those_of_the_reference_rounding(kv_format) -> None:
    format = ElementFormat(kv_format)
    values = 3 * torch.randn((7, 2, 32), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values[0] = 0.0
    assert torch.equal(rounded(values, format), as_stored(values, format))


def test_every_byte_of_fp8_and_fp4_is_the_number_it_stands_for() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = decode(codes[:, None], ElementFormat.FP8)
    finite = ~numbers.isnan()
    assert int(finite.sum()) == 254, "e4m3 has two NaNs and no infinity"
    assert torch.equal(encode(numbers[finite], ElementFormat.FP8)[0], codes[finite[:, 0]])
    halves = decode(codes[None, :8], ElementFormat.NVFP4, torch.tensor([[56]], dtype=torch.uint8))  # e4m3's 1.0
    assert halves[0].tolist() == [0, 0, 0.5, 0, 1, 0, 1.5, 0, 2, 0, 3, 0, 4, 0, 6, 0]


def test_attention_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(2)
    queries, keys, values = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 8), (5, 3, 8), (5, 3, 4))
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        queries[:, None], keys.transpose(0, 1), values.transpose(0, 1)
    )[:, 0]
    got, skipped = attend(queries, keys, values, torch.arange(5), SkipSoftmax(0.0, 2))
    assert skipped == 0
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_block_far_below_the_largest_score_takes_no_part() -> None:
    """One head, scores 0, 0, 9, 8 in blocks of two: the first block was used before a larger score came."""
    one = torch.ones((1, 1), dtype=torch.float64)
    keys = torch.tensor([9.0, 8.0, 0.0, 0.0], dtype=torch.float64)[:, None, None]
    values = torch.tensor([1.0, 2.0, 50.0, 70.0], dtype=torch.float64)[:, None, None]
    first, skipped = attend(one, keys, values, torch.arange(4), SkipSoftmax(1.0, 2))
    assert skipped == 1
    weights = torch.softmax(torch.tensor([9.0, 8.0], dtype=torch.float64), 0)
    torch.testing.assert_close(first[0, 0], weights @ torch.tensor([1.0, 2.0], dtype=torch.float64))
    order = [2, 3, 0, 1]
    assert attend(one, keys[order], values[order], torch.arange(4), SkipSoftmax(1.0, 2))[1] == 0


@pytest.mark.parametrize(
    ("allocator", "kv_format"),
    [*[("trtllm-v2", kv_format) for kv_format in FORMATS], ("trtllm-v1", "bf16"), ("trtllm-v1", "nvfp4")],
)
def test_allocators_give_the_tokens_of_a_contiguous_cache(allocator, kv_format) -> None:
    spec = spec_of(GDN, FULL, WINDOW, kv_format=kv_format)
    deployment = Deployment(spec, allocator)
    got = everything(HybridModel(spec), deployment)
    assert got == on_a_contiguous_cache(spec)
    assert deployment.findings == ()
    assert got[0].divergent
    seen = deployment.ranks[0].cache.seen
    assert seen >= {"beams of divergent parents", "fork in the middle of a block", "state hit", "window passed"}


def test_formats_give_logits_of_their_own() -> None:
    """What is rounded otherwise shows, so equal logits say something."""
    peaks = set()
    for kv_format in FORMATS:
        spec = spec_of(FULL, FULL, kv_format=kv_format)
        peaks.add(greedy(HybridModel(spec), Deployment(spec, "trtllm-v2"), {0: prompt(0, 9)}, 2)[0].peaks)
    assert len(peaks) == len(FORMATS)


@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2"])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_latent_layers_too(allocator, kv_layout) -> None:
    spec = spec_of(LatentLayer(latent_dim=8, rope_dim=4), LatentLayer(latent_dim=8, window=6))
    spec = msgspec.structs.replace(spec, consumer=msgspec.structs.replace(spec.consumer, kv_layout=kv_layout))
    got = everything(HybridModel(spec), Deployment(spec, allocator))
    assert got == everything(HybridModel(spec), ContiguousStore(spec))


@pytest.mark.parametrize("allocator", ["trtllm-v2-qsa-legacy", "trtllm-v2-qsa-packed"])
def test_sparse_selection_is_the_same_under_both_registrations(allocator) -> None:
    spec = spec_of(GDN, QSA, GDN, QSA)
    model, dense = HybridModel(spec, sparse=Sparse()), HybridModel(spec)
    deployment = Deployment(spec, allocator)
    got = everything(model, deployment)
    assert got == everything(model, ContiguousStore(spec))
    assert got != everything(dense, ContiguousStore(spec)), "the selection leaves something out"
    assert deployment.findings == ()


def test_where_legacy_does_not_build_packed_does() -> None:
    spec = spec_of(GDN, QSA, QSA, kv_format="fp8")  # index keys as large as K pages
    with pytest.raises(Rejected):
        Deployment(spec, "trtllm-v2-qsa-legacy")
    model = HybridModel(spec, sparse=Sparse())
    got = everything(model, Deployment(spec, "trtllm-v2-qsa-packed"))
    assert got == everything(model, ContiguousStore(spec))


@pytest.mark.parametrize("name", ["tp2", "pp2", "tp2pp2", "adp2"])
def test_parallel_layouts_change_no_bit(name) -> None:
    spec = spec_of(GDN, FULL, GDN, WINDOW, kv_format="nvfp4")
    alone = on_a_contiguous_cache(spec)
    shared = in_parallel(spec, name)
    deployment = Deployment(shared, "trtllm-v2")
    assert len(deployment.ranks) == shared.parallel.world_size
    assert everything(HybridModel(shared), deployment) == alone
    assert deployment.findings == ()


def test_stages_that_reuse_different_prefixes_are_refused() -> None:
    """Attention alone finds a prefix in the middle of a block; a stage with a recurrent layer needs a snapshot."""
    spec = in_parallel(spec_of(GDN, FULL, WINDOW), "pp3")
    with pytest.raises(SpecError, match="ranks start request 3 at different tokens"):
        everything(HybridModel(spec), Deployment(spec, "trtllm-v2"))


def test_replicated_heads_are_read_from_the_rank_that_computes_them() -> None:
    """Two heads over four ranks: every rank serves a share of its head's queries, and a spoilt replica shows."""
    spec = spec_of(FULL, WINDOW)
    alone = two_requests(HybridModel(spec), ContiguousStore(spec))
    shared = in_parallel(spec, "tp4")
    assert two_requests(HybridModel(shared), Deployment(shared, "trtllm-v2")) == alone
    spoilt = Deployment(shared, "trtllm-v2")
    spoilt.ranks[3] = Deployment(shared, "fault:swap-kv-lanes").ranks[3]
    assert two_requests(HybridModel(shared), spoilt) != alone


def test_requests_that_come_back_go_on_as_if_nothing_had_happened() -> None:
    """A second replay, chunks, and pages that moved to the host and into other slots in between."""
    spec = spec_of(GDN, FULL, WINDOW)
    alone = two_requests(HybridModel(spec), ContiguousStore(spec))
    moves = [
        Operation("suspend", 0),
        Operation("offload", 30),
        Operation("admit", 5, 9),
        Operation("resume", 0),
        Operation("free", 5),
    ]
    deployment = Deployment(spec, "trtllm-v2")
    got = greedy(
        HybridModel(spec), deployment, {0: prompt(0, 11), 1: prompt(3, 7)}, 6, texts={1: 3}, between={3: moves}, chunk=3
    )
    assert got == alone
    assert deployment.findings == ()
    assert deployment.ranks[0].cache.seen >= {"prompt in chunks"}
    assert two_requests(HybridModel(spec), Deployment(spec, "trtllm-v2")) == alone


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_skip_softmax_with_divergent_beams_is_the_same_on_v1_and_v2(kv_format) -> None:
    """A factor that skips changes the answer on both managers alike; a factor of zero changes nothing."""
    spec = spec_of(GDN, FULL, WINDOW, kv_format=kv_format)
    found = {}
    for factor in (None, 0.0, 1.0):
        for allocator in ("trtllm-v1", "trtllm-v2"):
            model = HybridModel(spec, skip=None if factor is None else SkipSoftmax(factor))
            beams = beam_search(model, Deployment(spec, allocator), prompt(0, 20), 8)
            found[factor, allocator] = (beams, model.skipped)
        assert found[factor, "trtllm-v1"] == found[factor, "trtllm-v2"]
    (dense, _), (zero, none), (active, skipped) = (found[factor, "trtllm-v2"] for factor in (None, 0.0, 1.0))
    assert (zero, none) == (dense, 0)
    assert skipped > 0
    assert active.tokens != dense.tokens
    assert active.divergent
    assert dense.divergent
    assert len(set(active.tokens)) == 4


@pytest.mark.parametrize("mode", ["separate", "folded"])
@pytest.mark.parametrize(("allocator", "tokens"), [("trtllm-v1", 5), ("trtllm-v2", 5), ("trtllm-v2", 60)])
def test_drafts_are_accepted_as_over_a_contiguous_cache(mode, allocator, tokens) -> None:
    """Proposals, and how many of each were right; whatever is proposed, the target's own tokens come out."""
    spec = spec_of(FULL, WINDOW, draft=Draft(mode=mode, layers=(FULL, FULL)))
    model, deployment = HybridModel(spec), Deployment(spec, allocator)
    got = speculative(model, deployment, prompt(0, tokens), 11)
    assert got == speculative(model, ContiguousStore(spec), prompt(0, tokens), 11)
    assert got.tokens == greedy(model, ContiguousStore(spec), {0: prompt(0, tokens)}, 11)[0].tokens
    assert 0 < sum(got.accepted) < 2 * len(got.accepted), "some are right, and some are not"
    assert deployment.findings == ()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_kernels_move_the_same_bytes(host, kv_format) -> None:
    """Append and fetch kernels in place of indexing, beams of divergent parents included."""
    from kvsan.kernels.testbed.triton_paged import TritonMemory

    spec = spec_of(GDN, FULL, kv_format=kv_format)
    deployment = Deployment(spec, "trtllm-v2", memory=TritonMemory)
    got = beam_search(HybridModel(spec), deployment, prompt(0, 6), 3)
    assert got == beam_search(HybridModel(spec), ContiguousStore(spec), prompt(0, 6), 3)
    assert got.divergent
    memory = deployment.ranks[0]
    assert isinstance(memory, TritonMemory)
    assert memory.launches == 4 * (6 + 2 * 4), "K and V of every token, written and read"


FAULTS: Final = (
    ("fault:layer-ordinal-off-by-one", "bf16"),
    ("fault:swap-kv-lanes", "bf16"),
    ("fault:scale-pool-uses-data-scale", "nvfp4"),
    ("fault:short-chunk-writes-source", "bf16"),
    ("fault:snapshot-is-live-state", "bf16"),
    ("fault:partial-copy-forgets-scales", "nvfp4"),
    ("fault:window-end-off-by-one", "bf16"),
)


@pytest.mark.parametrize(("fault", "kv_format"), FAULTS)
def test_faulty_caches_change_what_is_said(fault, kv_format) -> None:
    spec = spec_of(GDN, FULL, WINDOW, kv_format=kv_format)
    deployment = Deployment(spec, fault)
    got = everything(HybridModel(spec), deployment)
    assert got != on_a_contiguous_cache(spec)
    assert deployment.findings, "and the running cache says why"


def test_index_keys_in_the_place_of_keys_change_what_is_said() -> None:
    spec = spec_of(GDN, QSA, QSA, kv_format="fp8")
    model = HybridModel(spec, sparse=Sparse())
    wanted = everything(model, ContiguousStore(spec))
    assert everything(model, Deployment(spec, "fault:coalesce-by-size")) != wanted


def test_what_the_testbed_cannot_do_is_said() -> None:
    with pytest.raises(SpecError, match="needs whole groups on every rank"):
        Deployment(in_parallel(spec_of(GDN, FULL), "tp4"), "trtllm-v2")
    with pytest.raises(SpecError, match="has attention, latent attention and gated delta nets"):
        HybridModel(spec_of(RecurrentLayer(algorithm="short_conv", heads=4)))
    hybrid = spec_of(GDN, FULL, draft=Draft(mode="folded", layers=(FULL,)))
    with pytest.raises(SpecError, match="cannot take rejected tokens back"):
        speculative(HybridModel(hybrid), ContiguousStore(hybrid), prompt(0, 5), 3)
    small = spec_of(FULL, slots=2)
    with pytest.raises(Refused):
        greedy(HybridModel(small), Deployment(small, "trtllm-v2"), {0: prompt(0, 11)}, 2)
