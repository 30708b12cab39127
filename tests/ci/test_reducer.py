"""The reducer reaches the one minimum from wherever it starts, never goes up, and copes with any spec."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvsan.ci.faults import FAULTS, Fault, shows
from kvsan.ci.reducer import reduce_spec
from kvsan.ci.simplicity import simplicity_key
from kvsan.model.errors import SpecError
from kvsan.model.formats import KV_FORMATS, STATE_FORMATS, ElementFormat
from kvsan.model.layers import (
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, Draft
from kvsan.sim.verdict import judge

QUICK_SEEDS = range(2)
SEEDS = range(2, 12)

by_name = pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.kind == "layout"], ids=lambda fault: fault.name
)


# Random specs: a few layer classes, a pattern over them, and every other axis. Sparse ones are half the time such that
# an index page is as large as a K page.


def _geometry(rng: random.Random) -> dict[str, int]:
    return {
        "kv_heads": rng.choice([1, 2, 3, 4, 4, 6, 8, 8, 12, 16]),
        "head_dim": rng.choice([64, 80, 96, 128, 128, 256]),
    }


def _recurrent(rng: random.Random) -> RecurrentLayer:
    if rng.random() < 0.3:
        return RecurrentLayer(algorithm="short_conv", heads=rng.choice([64, 256]))
    return RecurrentLayer(algorithm="gdn", heads=16, head_dim=rng.choice([64, 128]), groups=8, state_dim=128)


def _planes(rng: random.Random, geometry: dict[str, int], kv_format: ElementFormat) -> tuple[SidePlane, ...]:
    dim, heads, plane_format = rng.choice([64, 128, 256, 96]), rng.choice([1, 1, 2]), ElementFormat.BF16
    if rng.random() < 0.6:
        while geometry["kv_heads"] * geometry["head_dim"] * kv_format.bits > 16 * 1024:
            geometry["kv_heads"] //= 2
        dim, heads = geometry["kv_heads"] * geometry["head_dim"] * kv_format.bits // 16, 1
    else:
        plane_format = rng.choice([ElementFormat.BF16, ElementFormat.FP8, ElementFormat.UINT8])
    index = SidePlane(role="index_key", dim=dim, heads=heads, format=plane_format)
    position = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
    return (index, position) if rng.random() < 0.5 else (index,)


def _sparse_classes(rng: random.Random, kv_format: ElementFormat) -> list[Layer]:
    geometry = _geometry(rng)
    planes = _planes(rng, geometry, kv_format)
    sparse = AttentionLayer(**geometry, side_planes=planes)
    choices = [sparse, sparse, sparse, AttentionLayer(**geometry), _recurrent(rng), _recurrent(rng), UncachedLayer()]
    return [rng.choice(choices) for _ in range(rng.randint(1, 4))]


def _dense_classes(rng: random.Random) -> list[Layer]:
    if rng.random() < 0.12:
        return [LatentLayer(latent_dim=512, rope_dim=64)]
    common = _geometry(rng)
    classes: list[Layer] = []
    for _ in range(rng.randint(1, 4)):
        geometry = common if rng.random() < 0.5 else _geometry(rng)
        window = {"window": rng.choice([128, 1024]), "sink_tokens": rng.choice([0, 4])} if rng.random() < 0.3 else {}
        attention = AttentionLayer(**geometry, **window)
        hybrid = HybridLayer(attention=attention, recurrent=_recurrent(rng))
        classes.append(rng.choice([attention] * 12 + [_recurrent(rng)] * 3 + [UncachedLayer()] + [hybrid] * 2))
    return classes


def random_spec(rng: random.Random, sparse: bool) -> CacheSpec:
    kv_format = rng.choice(KV_FORMATS)
    classes = _sparse_classes(rng, kv_format) if sparse else _dense_classes(rng)
    pattern = [rng.choice(classes) for _ in range(rng.randint(1, 8))]
    layers = tuple(pattern[index % len(pattern)] for index in range(rng.randint(2, 40)))
    parallel = ParallelLayout(
        tp=rng.choice([1, 1, 2, 3, 4, 8]),
        pp=rng.choice([1, 1, 2, 3]),
        cp=rng.choice([1, 1, 1, 2]),
        attention_dp=rng.random() < 0.2,
    )
    drafted = [layer for layer in classes if isinstance(layer, AttentionLayer | LatentLayer)]
    draft = Draft()
    if drafted and rng.random() < 0.3:
        mode = rng.choice(["folded", "separate"])
        draft = Draft(mode=mode, layers=(rng.choice(drafted),) * rng.randint(1, 2))  # type: ignore[arg-type]
    slots, quota_bytes = (
        (rng.choice([1, 2, 4, 7, 64]), None) if rng.random() < 0.8 else (None, rng.choice([1 << 30, 1 << 33]))
    )
    kv_layout: Any = rng.choice(["HND", "NHD"])
    return CacheSpec(
        model=rng.choice(["", "a model"]),
        layers=layers,
        kv_format=kv_format,
        state_format=rng.choice(STATE_FORMATS),
        tokens_per_block=rng.choice([1, 8, 16, 32, 64]),
        max_sequence_tokens=rng.choice([None, None, 512, 32768]),
        parallel=parallel,
        rank=rng.randrange(parallel.world_size),
        draft=draft,
        sparse_algorithm="qsa" if sparse else None,
        slots=slots,
        quota_bytes=quota_bytes,
        consumer=Consumer(kv_layout=kv_layout, offset_bits=rng.choice([32, 64])),
    )


def failing_spec(seed: int, fault: Fault, fails: Callable[[CacheSpec], bool]) -> CacheSpec:
    """Return the first random spec that fails, for one seed."""
    rng = random.Random(seed)
    while True:
        try:
            spec = random_spec(rng, sparse="qsa" in fault.base)
        except SpecError:
            continue
        if fails(spec):
            return spec


def reach_the_minimum(fault: Fault, seeds: range) -> None:
    def fails(spec: CacheSpec) -> bool:
        return shows(fault, spec)

    found = {}
    for seed in seeds:
        spec = failing_spec(seed, fault, fails)
        reduced = reduce_spec(spec, fails)
        assert fails(reduced.spec)
        assert simplicity_key(reduced.spec) <= simplicity_key(spec)
        found[seed] = reduced.spec
    assert {seed: spec for seed, spec in found.items() if spec != fault.minimum} == {}


@by_name
def test_a_few_random_specs_shrink_to_the_known_minimum(fault: Fault) -> None:
    reach_the_minimum(fault, QUICK_SEEDS)


@pytest.mark.slow
@by_name
def test_every_random_spec_shrinks_to_the_known_minimum(fault: Fault) -> None:
    reach_the_minimum(fault, SEEDS)


@by_name
def test_a_minimum_stays_as_it_is(fault: Fault) -> None:
    assert reduce_spec(fault.minimum, lambda spec: shows(fault, spec)).spec == fault.minimum


PLANE = SidePlane(role="index_key", dim=128, format=ElementFormat.FP8, heads=3)
STATE = AuxiliaryState(role="context", shape=(7, 9), format=ElementFormat.INT64)
MAMBA = RecurrentLayer(
    algorithm="mamba2", heads=6, head_dim=64, groups=2, state_dim=16, conv_kernel=4, ssm_format=ElementFormat.FP32,
    auxiliary=(STATE,),
)  # fmt: skip
DENSE = AttentionLayer(
    kv_heads=6, head_dim=96, window=100, sink_tokens=5, kv_format=ElementFormat.FP8, side_planes=(PLANE,)
)
LATENT = LatentLayer(latent_dim=512, rope_dim=64, tokens_per_block=8)
EVERYTHING = CacheSpec(
    model="everything",
    layers=(DENSE, MAMBA, UncachedLayer(), HybridLayer(attention=DENSE, recurrent=MAMBA), LATENT) * 4,
    kv_format=ElementFormat.NVFP4,
    state_format=ElementFormat.FP32,
    conv_format=ElementFormat.FP16,
    max_sequence_tokens=4096,
    parallel=ParallelLayout(tp=4, pp=3, ep=2, cp=2, pp_partition=(5, 6, 9)),
    rank=21,
    draft=Draft(mode="separate", layers=(DENSE, LATENT)),
    sparse_algorithm="qsa",
    slots=77,
    state_slots=33,
    consumer=Consumer(kv_layout="NHD", alignment_bytes=128, index_bits=64, offset_bits=32),
)
PLAINEST = CacheSpec(layers=(UncachedLayer(),), tokens_per_block=1, slots=1)


def _parts(spec: CacheSpec, kind: type) -> list[Any]:
    found: list[Any] = []
    for layer in spec.layers + spec.draft.layers:
        parts = (layer.attention, layer.recurrent) if isinstance(layer, HybridLayer) else (layer,)
        found += [part for part in parts if isinstance(part, kind)]
    return found


def _states(spec: CacheSpec) -> list[AuxiliaryState]:
    return [state for part in _parts(spec, RecurrentLayer) for state in part.auxiliary]


def _plane_list(spec: CacheSpec) -> list[SidePlane]:
    return [plane for part in _parts(spec, AttentionLayer) for plane in part.side_planes]


def _pp_rank(spec: CacheSpec) -> int:
    return spec.parallel.coordinates(spec.rank).pp_rank


LOWERED: list[tuple[str, Callable[[CacheSpec], bool], Callable[[CacheSpec], Any], Any]] = [
    ("nothing", lambda spec: True, lambda spec: spec, PLAINEST),
    ("layers", lambda spec: len(spec.layers) >= 7, lambda spec: spec.layers, (UncachedLayer(),) * 7),
    ("heads", lambda spec: any(part.kv_heads > 4 for part in _parts(spec, AttentionLayer)),
     lambda spec: spec.layers, (AttentionLayer(kv_heads=5, head_dim=128),)),
    ("rope", lambda spec: any(part.rope_dim > 4 for part in _parts(spec, LatentLayer)),
     lambda spec: spec.layers, (LatentLayer(latent_dim=128, rope_dim=5),)),
    ("window", lambda spec: any(part.window for part in _parts(spec, AttentionLayer)),
     lambda spec: spec.layers, (AttentionLayer(kv_heads=1, head_dim=128, window=1),)),
    ("plane", lambda spec: any(plane.heads * plane.dim > 300 for plane in _plane_list(spec)),
     lambda spec: [(p.dim, p.heads, p.format.value) for p in _plane_list(spec)], [(128, 3, "bf16")]),
    ("context", lambda spec: any(state.shape[0] > 5 for state in _states(spec)),
     lambda spec: [(state.shape, state.format.value) for state in _states(spec)], [((6,), "bf16")]),
    ("state", lambda spec: any(part.state_dim > 2 for part in _parts(spec, RecurrentLayer)),
     lambda spec: [(p.algorithm, p.heads, p.state_dim) for p in _parts(spec, RecurrentLayer)], [("mamba1", 1, 3)]),
    ("hybrid", lambda spec: any(isinstance(layer, HybridLayer) for layer in spec.layers),
     lambda spec: [type(layer) for layer in spec.layers], [HybridLayer]),
    ("stage", lambda spec: _pp_rank(spec) >= 1, lambda spec: (spec.parallel.name, spec.rank, len(spec.layers)),
     ("tp1pp2", 1, 2)),
    ("ranks", lambda spec: spec.parallel.world_size >= 6, lambda spec: spec.parallel, ParallelLayout(cp=6)),
    ("tensor rank", lambda spec: spec.parallel.coordinates(spec.rank).tp_rank >= 1,
     lambda spec: (spec.parallel, spec.rank), (ParallelLayout(tp=2), 1)),
    ("draft", lambda spec: spec.draft.mode != "none",
     lambda spec: spec.draft, Draft(mode="folded", layers=(LatentLayer(latent_dim=128),))),
    ("slots", lambda spec: (spec.slots or 0) > 60, lambda spec: spec.slots, 61),
    ("state slots", lambda spec: (spec.state_slots or 0) > 20, lambda spec: spec.state_slots, 21),
    ("alignment", lambda spec: spec.consumer.alignment_bytes > 16, lambda spec: spec.consumer.alignment_bytes, 32),
    ("longest", lambda spec: (spec.max_sequence_tokens or 0) > 1000, lambda spec: spec.max_sequence_tokens, 1001),
    ("model", lambda spec: spec.model != "", lambda spec: spec, msgspec.structs.replace(PLAINEST, model="everything")),
]  # fmt: skip


@pytest.mark.parametrize(("fails", "seen", "least"), [row[1:] for row in LOWERED], ids=[row[0] for row in LOWERED])
def test_every_kind_of_number_is_lowered(
    fails: Callable[[CacheSpec], bool], seen: Callable[[CacheSpec], Any], least: Any
) -> None:
    assert seen(reduce_spec(EVERYTHING, fails).spec) == least


def test_a_quota_becomes_slots_where_it_may() -> None:
    spec = msgspec.structs.replace(EVERYTHING, slots=None, quota_bytes=10**12)
    assert reduce_spec(spec, lambda spec: True).spec == PLAINEST
    assert reduce_spec(spec, lambda spec: (spec.quota_bytes or 0) > 12345).spec.quota_bytes == 12346


def test_numbers_that_hold_each_other_move_together() -> None:
    def pages_meet(spec: CacheSpec) -> bool:
        part, plane = (_parts(spec, AttentionLayer) or [None])[0], (_plane_list(spec) or [None])[0]
        if part is None or plane is None:
            return False
        kv_format = part.kv_format or spec.kv_format
        return bool(part.kv_heads * part.head_dim * kv_format.bits == 8 * plane.token_bytes)

    plane = SidePlane(role="some_role", dim=60, heads=3, format=ElementFormat.FP16)
    layer = AttentionLayer(kv_heads=9, head_dim=80, side_planes=(plane,))
    spec = CacheSpec(layers=(layer,), kv_format=ElementFormat.NVFP4)
    found = reduce_spec(spec, pages_meet).spec
    assert found.kv_format is ElementFormat.BF16
    index = SidePlane(role="index_key", dim=128, format=ElementFormat.BF16)
    assert found.layers == (AttentionLayer(kv_heads=1, head_dim=128, side_planes=(index,)),)


def test_only_failing_and_simpler_specs_are_ever_kept() -> None:
    kept = []

    def fails(spec: CacheSpec) -> bool:
        verdict = len(spec.layers) % 3 == 2 and spec.parallel.tp > 1
        if verdict:
            kept.append(simplicity_key(spec))
        return verdict

    reduced = reduce_spec(EVERYTHING, fails)
    assert kept == sorted(kept, reverse=True)
    assert simplicity_key(reduced.spec) == kept[-1]
    assert reduce_spec(reduced.spec, fails).spec == reduced.spec


def test_the_same_input_gives_the_same_answer_and_the_same_checks() -> None:
    def fails(spec: CacheSpec) -> bool:
        return sum(layer.kv_heads for layer in _parts(spec, AttentionLayer)) > 11

    assert reduce_spec(EVERYTHING, fails) == reduce_spec(EVERYTHING, fails)


def test_the_number_of_checks_is_bounded() -> None:
    calls = 0

    def fails(spec: CacheSpec) -> bool:
        nonlocal calls
        calls += 1
        return len(spec.layers) > 3

    reduced = reduce_spec(EVERYTHING, fails, max_checks=5)
    assert calls == reduced.checks == 6
    assert simplicity_key(reduced.spec) < simplicity_key(EVERYTHING)


def test_a_spec_that_passes_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        reduce_spec(EVERYTHING, lambda spec: False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fault:coalesce-by-size", "fault:heads-floor"])
def test_ten_thousand_layers_shrink_in_seconds(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    plane = SidePlane(role="index_key", dim=1024, format=ElementFormat.BF16)
    dense = AttentionLayer(kv_heads=8, head_dim=256)
    sparse = msgspec.structs.replace(dense, side_planes=(plane,))
    spec = CacheSpec(layers=(sparse, dense, dense, UncachedLayer()) * 2500, kv_format=ElementFormat.FP8)
    if name == "fault:heads-floor":
        layers = tuple([AttentionLayer(kv_heads=1 + index % 97, head_dim=16) for index in range(10_000)])
        spec = CacheSpec(layers=layers, parallel=ParallelLayout(tp=8, pp=5), rank=33)
    start = time.perf_counter()
    reduced = reduce_spec(spec, lambda candidate: shows(fault, candidate))
    assert reduced.spec == fault.minimum
    assert time.perf_counter() - start < 30


@pytest.mark.slow
def test_ten_thousand_layers_that_all_matter_take_bounded_time() -> None:
    layer = AttentionLayer(kv_heads=8, head_dim=128)
    spec = CacheSpec(layers=(layer,) * 10_000)
    checks = 0

    def fails(candidate: CacheSpec) -> bool:
        nonlocal checks
        checks += 1
        judge(candidate, "trtllm-v2")
        return len(candidate.layers) == 10_000

    reduced = reduce_spec(spec, fails)
    assert reduced.checks == checks <= 60
    assert len(reduced.spec.layers) == 10_000
