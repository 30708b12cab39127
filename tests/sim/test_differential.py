"""Static rules, byte arena and arithmetic from the published engine, compared on many random specs.

Three answers about one spec, none of which shares code with another: the static rules (interval arithmetic), the arena
(bytes written and read back), and the tables of ``expected_v2`` below, written from the description of the engine's
storage alone.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import (
    INDEX_KEY,
    INDEX_POSITION,
    AttentionLayer,
    HybridLayer,
    LatentLayer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)
from kvsan.model.parallel import ParallelLayout
from kvsan.model.rank import RankLayer
from kvsan.model.spec import CacheSpec
from kvsan.sim.allocators.trtllm.registration import Registration
from kvsan.sim.allocators.trtllm.storage import StorageLayer, coalesce
from kvsan.sim.arena import arena_findings
from kvsan.sim.checking import check
from kvsan.sim.layout import KEY, KEY_SCALE, SIDE_PLANES, VALUE, VALUE_SCALE, Layout
from kvsan.sim.page import dense_page
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.sim.rules import alias, bounds, op_address


def _neighbour(name: str) -> ModuleType:
    """Import a helper module that lies beside this file; tests are no package."""
    spec = importlib.util.spec_from_file_location(f"kvsan_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


random_spec = _neighbour("random_specs").random_spec

ALLOCATORS = ("trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-legacy", "trtllm-v2-qsa-packed")
ON_BYTES = (bounds.RULE, alias.RULE, op_address.RULE)
"""The rules that speak of bytes alone, which an arena can see."""


# The engine's storage, from its description: roles and sizes, life cycles, coalescing, groups.


def expected_sizes(layer: AttentionLayer | LatentLayer, spec: CacheSpec) -> list[tuple[str, int]]:
    """Role and expanded bytes of a layer's K, V and scale buffers: H * D * bits / 8 * T, one scale per 16 elements."""
    own = layer.kv_format or spec.kv_format
    heads, dim, roles = 1, 0, [KEY]
    if isinstance(layer, LatentLayer):
        dim = layer.latent_dim + layer.rope_dim
    else:
        ranks = 1 if spec.parallel.attention_dp else spec.parallel.tp
        heads, dim, roles = (layer.kv_heads + ranks - 1) // ranks, layer.head_dim, [KEY, VALUE]
    tokens = spec.tokens_per_block  # a smaller block of the layer is expanded to the manager's
    data = [(role, heads * dim * own.bits * tokens // 8) for role in roles]
    if own is ElementFormat.NVFP4:
        data += [(role, heads * dim * tokens // 16) for role in (KEY_SCALE, VALUE_SCALE)[: len(roles)]]
    return data


def expected_layers(spec: CacheSpec) -> dict[str, list[tuple[int, tuple[object, ...], list[tuple[str, int]]]]]:
    """Return, by manager, (layer, life-cycle key, buffers) in the order of registration, side planes separate."""
    last = spec.parallel.pp - 1
    stage = spec.rank // (spec.parallel.tp * spec.parallel.cp)
    count, pp = len(spec.layers), spec.parallel.pp
    sizes = list(spec.parallel.pp_partition or [count // pp + (number < count % pp) for number in range(pp)])
    sizes[-1] += count - sum(sizes)
    first = sum(sizes[:stage])
    target = [(index, spec.layers[index]) for index in range(first, first + sizes[stage])]
    draft = [(count + number, layer) for number, layer in enumerate(spec.draft.layers)] if stage == last else []
    managers = {"target": target + (draft if spec.draft.mode == "folded" else [])}
    if draft and spec.draft.mode == "separate":
        managers["draft"] = draft
    return {name: list(_registered(layers, spec)) for name, layers in managers.items()}


def _registered(layers, spec):
    taken: set[str] = set()
    for index, layer in layers:
        paged = layer.attention if isinstance(layer, HybridLayer) else layer
        if isinstance(paged, AttentionLayer | LatentLayer):
            window = paged.window
            if window is not None and spec.max_sequence_tokens is not None and window >= spec.max_sequence_tokens:
                window = None
            sinks = -(-paged.sink_tokens // spec.tokens_per_block) if window is not None else 0
            planes = [plane for plane in paged.side_planes if plane.scope == "layer"]
            planes += [plane for plane in paged.side_planes if plane.scope == "rank" and plane.role not in taken]
            taken.update(plane.role for plane in planes if plane.scope == "rank")
            extra = [
                (plane.role, plane.heads * plane.dim * plane.format.bits // 8 * spec.tokens_per_block)
                for plane in planes
            ]
            yield index, ("attention", window, sinks), expected_sizes(paged, spec) + extra
        state = layer.recurrent if isinstance(layer, HybridLayer) else layer
        if isinstance(state, RecurrentLayer):
            ranks = 1 if spec.parallel.attention_dp else spec.parallel.tp * spec.parallel.cp
            ssm, conv = state.ssm_format or spec.state_format, state.conv_format or spec.conv_format
            inner = state.heads * state.head_dim
            channels = (inner + 2 * state.groups * state.state_dim) // ranks
            buffers = [("ssm_state", inner // ranks * state.state_dim * ssm.bits // 8)] if state.state_dim else []
            buffers.append(("conv_state", channels * (state.conv_kernel - 1) * conv.bits // 8))
            for auxiliary in state.auxiliary:
                elements = 1
                for size in auxiliary.shape:
                    elements *= size
                buffers.append((auxiliary.role, elements * auxiliary.format.bits // 8))
            yield index, ("ssm",), buffers


def brute_coalesce(layers):
    """Return life cycles [(key, [(size, members)])] in order, and the groups' tuples of slot bytes in order."""
    groups: dict[object, dict[int, list[tuple[int, str]]]] = {}
    for layer, key, buffers in layers:
        of_key = groups.setdefault(key, {})
        for role, size in buffers:
            of_key.setdefault(size, []).append((layer, role))
    cycles = []
    for key, of_size in groups.items():
        pools = list(of_size.items())
        # a stable sort by hand: the largest total first, the earlier of equal ones first
        ordered = []
        while pools:
            best = max(size * len(members) for size, members in pools)
            chosen = next(pool for pool in pools if pool[0] * len(pool[1]) == best)
            ordered.append(chosen)
            pools.remove(chosen)
        cycles.append((key, ordered))
    tuples: list[tuple[int, ...]] = []
    for _, pools in cycles:
        slot_sizes = tuple(size * len(members) for size, members in pools)
        if slot_sizes not in tuples:
            tuples.append(slot_sizes)
    return cycles, tuples


def placed(layers):
    """Return {(layer, role): (group, pool, offset, slot bytes, life-cycle number)} of one manager."""
    cycles, tuples = brute_coalesce(layers)
    places = {}
    for number, (_, pools) in enumerate(cycles):
        group = tuples.index(tuple(size * len(members) for size, members in pools))
        for pool, (size, members) in enumerate(pools):
            for ordinal, member in enumerate(members):
                places[member] = group, pool, ordinal * size, size * len(members), number
    return places


def sizes_meet(spec: CacheSpec, allocator: str) -> bool:
    """Whether two kinds of pages of one life cycle are equally large, so that the engine coalesces what it should not.

    A kind is K/V or scales of one geometry and format; side planes may meet each other. The packed plane counts.
    """
    for layers in expected_layers(spec).values():
        kinds: dict[tuple[object, int], set[object]] = {}
        planes = 0
        for index, key, buffers in layers:
            layer = (spec.layers + spec.draft.layers)[index]
            for role, size in buffers:
                kind: object = role
                if role in (KEY, VALUE, KEY_SCALE, VALUE_SCALE):
                    paged = layer.attention if isinstance(layer, HybridLayer) else layer
                    own = msgspec.structs.replace(paged, side_planes=(), window=None, sink_tokens=0)
                    kind = ("scale" if role.endswith("scale") else "data", own)
                elif key != ("ssm",):
                    planes += size
                    kind = "plane"
                else:
                    kind = "state"
                kinds.setdefault((key, size), set()).add(kind)
        if any(len(found) > 1 for found in kinds.values()):
            return True
        if "packed" in allocator and any(size == planes for (key, size) in kinds if key != ("ssm",)):
            return True
    return False


# Tests


@pytest.mark.parametrize("seed", range(6))
def test_coalescing_agrees_with_the_description_on_random_registrations(seed: int) -> None:
    draw = random.Random(seed)
    merged = 0
    for _ in range(150):
        keys = [(False, None, 0), (True, None, 0), (False, 64, 0), (False, 64, 1), (False, 128, 0)]
        keys = draw.sample(keys, draw.randint(1, 4))
        sizes = draw.sample([1, 2, 3, 4, 6, 8, 12, 24, 96], draw.randint(1, 4))
        shapes = [[draw.choice(sizes) for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(1, 3))]
        layers = []
        for index in range(draw.randint(1, 14)):
            buffers = [(f"role{number}", size) for number, size in enumerate(draw.choice(shapes))]
            layers.append((index, draw.choice(keys), buffers))
        storage = coalesce(
            [
                StorageLayer(
                    RankLayer(index, index, UncachedLayer()),
                    key,
                    tuple(Registration(role, dense_page(ElementFormat.UINT8, ("b",), (n,)), n) for role, n in buffers),
                )
                for index, key, buffers in layers
            ]
        )
        cycles, tuples = brute_coalesce(layers)
        assert storage.groups == tuple(tuples)
        assert [cycle.key for cycle in storage.life_cycles] == [key for key, _ in cycles]
        for cycle, (_, pools) in zip(storage.life_cycles, cycles, strict=True):
            assert cycle.pools == tuple((size, len(members)) for size, members in pools)
            assert storage.groups[cycle.group] == cycle.slot_sizes
        merged += len(tuples) < len(cycles)
        found = {(place.layer.index, place.registration.role): place for place in storage.placements}
        expected = placed(layers)
        assert found.keys() == expected.keys()
        for member, (_, pool, offset, _, number) in expected.items():
            assert (found[member].life_cycle, found[member].pool, found[member].offset_bytes) == (number, pool, offset)
    assert merged, "no draw merged two life cycles into one group"


@pytest.mark.parametrize("mixed", [False, True])
def test_v2_places_every_buffer_where_the_description_does(mixed: bool) -> None:
    compared = Counter()
    for seed in range(500):
        spec = random_spec(seed, mixed=mixed)
        for allocator in ("trtllm-v2", "trtllm-v2-qsa-legacy"):
            try:
                layout = allocate(spec, allocator)
            except Rejected:
                continue
            expected = {
                (manager, *member): place
                for manager, layers in expected_layers(spec).items()
                for member, place in placed(layers).items()
            }
            found = {}
            for buffer in layout.buffers:
                pool = layout.pools[buffer.pool]
                place = (pool.group, pool.index, buffer.offset_bytes, pool.slot_bytes)
                found[buffer.manager, buffer.layer, buffer.role] = place
                assert buffer.slot_stride_bytes == pool.slot_bytes
                assert pool.size_bytes == pool.slot_bytes * pool.slot_count
            assert found == {member: place[:4] for member, place in expected.items()}, spec
            compared[allocator] += 1
    assert min(compared.values()) > 200


def answers(layout: Layout) -> tuple[set[str], set[str]]:
    """Return the rules that the static check and the arena find broken."""
    return (
        {finding.rule for finding in check(layout, rules=ON_BYTES)},
        {finding.rule for finding in arena_findings(layout)},
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("mixed", [False, True])
def test_static_rules_and_arena_agree_on_random_specs(mixed: bool, allocator: str) -> None:
    outcomes = Counter()
    for seed in range(1000, 1250):
        spec = random_spec(seed, mixed=mixed, odd=mixed)
        try:
            layout = allocate(spec, allocator)
        except Rejected:
            outcomes["refused"] += 1
            continue
        static, seen = answers(layout)
        assert static == seen, spec
        outcomes["accepted"] += 1
    assert outcomes["accepted"] > (40 if mixed else 140), outcomes


@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed"])
def test_sound_specs_have_no_finding_and_no_refusal_inside_the_support(allocator: str) -> None:
    outcomes = Counter()
    for seed in range(2000, 3500):
        spec = random_spec(seed, mixed=False)
        if allocator != "trtllm-v1" and sizes_meet(spec, allocator):
            outcomes["sizes meet"] += 1
            continue
        try:
            layout = allocate(spec, allocator)
        except Rejected as refusal:
            assert not refusal.supported, (spec, refusal.message)
            outcomes["refused"] += 1
            continue
        assert check(layout) == [], spec
        outcomes["accepted"] += 1
    assert outcomes["accepted"] > 700, outcomes
    assert outcomes["sizes meet"] < 150, "known limits match at most a tenth of drawn specs"


def test_the_arena_sees_what_a_collision_does_to_a_legacy_layout_that_builds() -> None:
    """One QSA layer on the rank: nothing to divide, so it builds, and NVFP4 scales are read with 3 pages per slot."""
    plane = SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16)
    layer = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(plane,))
    layout = allocate(CacheSpec(layers=(layer,), kv_format=ElementFormat.NVFP4), "trtllm-v2-qsa-legacy")
    static, seen = answers(layout)
    assert static == seen == {"bounds", "alias", "op-address"}


# The reference case of the packed manager: 48 layers, every fourth one QSA.


def reference(kv_format: ElementFormat, layout: str) -> CacheSpec:
    planes = (
        SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16),
        SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank"),
    )
    attention = AttentionLayer(kv_heads=2, head_dim=256, side_planes=planes)
    state = RecurrentLayer(algorithm="gdn", heads=4, head_dim=4, groups=4, state_dim=4)
    return CacheSpec(
        layers=(state, state, state, attention) * 12,
        kv_format=kv_format,
        tokens_per_block=32,
        parallel=ParallelLayout.parse(layout),
        slots=3,
    )


@pytest.mark.parametrize(
    ("kv_format", "layout", "page_bytes", "scale_bytes"),
    [("fp8", "tp2", 8192, 0), ("fp8", "tep4", 8192, 0), ("nvfp4", "tp1", 8192, 1024), ("nvfp4", "tp2", 4096, 512)],
)
def test_the_op_reaches_the_published_addresses(kv_format: str, layout: str, page_bytes: int, scale_bytes: int) -> None:
    built = allocate(reference(ElementFormat(kv_format), layout), "trtllm-v2-qsa-packed")
    (table,) = built.tables
    assert (table.index_scale, table.mapping_offsets, table.page_bytes) == (24, tuple(range(12)), page_bytes)
    lanes = {KEY: 0, VALUE: 1, KEY_SCALE: 0, VALUE_SCALE: 1}
    seen = Counter()
    for access in built.accesses:
        if access.consumer != "attention-op":
            continue
        buffer = built.buffers[access.buffer]
        size = scale_bytes if buffer.role.endswith("scale") else page_bytes
        ordinal = (buffer.layer - 3) // 4
        for slot in range(3):
            pointer = ordinal * 2 * size
            lane = slot * 24 + lanes[buffer.role]
            address = access.offset_bytes + slot * access.pitch_bytes
            assert address == pointer + lane * size == slot * 24 * size + ordinal * 2 * size + lanes[buffer.role] * size
            assert address == buffer.offset_bytes + slot * buffer.slot_stride_bytes
        seen[buffer.role] += 1
    assert seen == dict.fromkeys(lanes if scale_bytes else (KEY, VALUE), 12)
    if page_bytes == 8192 and not scale_bytes:
        assert {buffer.slot_stride_bytes for buffer in built.buffers if buffer.role == KEY} == {196608}
    (packed,) = [buffer for buffer in built.buffers if buffer.role == SIDE_PLANES]
    assert (packed.page_bytes, packed.slot_stride_bytes) == (98688, 98688)
    assert [part.offset_bytes for part in packed.parts] == [8192 * ordinal for ordinal in range(13)]
    assert arena_findings(built) == []


def test_latent_nvfp4_layers_with_an_index_plane_build() -> None:
    plane = SidePlane(role=INDEX_KEY, dim=132, format=ElementFormat.UINT8)
    layer = LatentLayer(latent_dim=64, side_planes=(plane,), kv_format=ElementFormat.NVFP4)
    assert check(allocate(CacheSpec(layers=(layer,)), "trtllm-v2")) == []


# Bugs of the allocators that are reported and not mended yet. Each test fails on the day on which its bug is gone.


def test_v1_windows_of_equal_page_bytes_keep_their_own_heads() -> None:
    layers = (AttentionLayer(kv_heads=4, head_dim=32, window=32), AttentionLayer(kv_heads=1, head_dim=128))
    layout = allocate(CacheSpec(layers=layers), "trtllm-v1")
    assert [buffer.page.shape[0] for buffer in layout.buffers if buffer.role == KEY] == [4, 1]
