"""Real bytes through a plan, compared with tensors that nobody has cut up, by code of the tests' own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, Layer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.layout import Layout
from kvsan.sim.transfer.execution import execute
from kvsan.sim.transfer.pair import Pair, comparable, judge_pair, lay_out
from kvsan.sim.transfer.plan import Copy, byte_copies
from kvsan.sim.transfer.planning import plan_transfer
from kvsan.sim.transfer.proof import prove

Bytes = npt.NDArray[np.uint8]

TOKENS = 8
"""Tokens of the request: whole blocks of 1, 2, 4 and 8."""

ATTENTION = AttentionLayer(
    kv_heads=4,
    head_dim=16,
    side_planes=(
        SidePlane(role="index_key", dim=24, format=ElementFormat.BF16),
        SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank"),
    ),
)
PLAIN = AttentionLayer(kv_heads=4, head_dim=16)
GDN = RecurrentLayer(algorithm="gdn", heads=8, head_dim=4, groups=4, state_dim=8)
MAMBA = RecurrentLayer(algorithm="mamba2", heads=8, head_dim=4, groups=4, state_dim=8)


def model(*layers: Layer, layout: str, tokens: int = 2, kv_layout: str = "HND", kv: str = "bf16") -> CacheSpec:
    return CacheSpec(
        layers=layers,
        parallel=ParallelLayout.parse(layout),
        tokens_per_block=tokens,
        kv_format=ElementFormat(kv),
        state_format=ElementFormat.FP32,
        slots=TOKENS + 1,
        consumer=Consumer(kv_layout=kv_layout),
    )


class Truth:
    """One cache for the whole model, drawn at random when first asked for."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(1)
        self.tensors: dict[tuple[int, str], Bytes] = {}

    def tensor(self, layer: int, role: str, shape: tuple[int, ...]) -> Bytes:
        found = self.tensors.get((layer, role))
        if found is None:
            found = self.tensors[layer, role] = self.random.integers(1, 256, shape, dtype=np.uint8)
        assert found.shape == shape
        return found


def elements(layout: Layout, truth: Truth, slots_of: Callable[[bool], list[int]]) -> Iterator[tuple[int, int, Bytes]]:
    """Yield (pool, first byte, bytes) of every row of every buffer that the request holds on one rank, one by one."""
    spec = layout.spec
    assert spec is not None
    tp = spec.parallel.attention_tp
    rank = spec.rank % spec.parallel.tp if tp > 1 else 0
    for buffer in layout.buffers:
        layer = spec.layers[buffer.layer]
        recurrent = isinstance(layer, RecurrentLayer)
        parts = [(part.layer, part.role, part.offset_bytes, part.page) for part in buffer.parts]
        for index, role, inside, page in parts or [(buffer.layer, buffer.role, 0, buffer.page)]:
            width = page.format.container_bytes
            row_bytes = page.shape[-1] * width
            for number, slot in enumerate(slots_of(recurrent)):
                base = buffer.offset_bytes + slot * buffer.slot_stride_bytes + inside
                for place in itertools.product(*map(range, page.shape[:-1])):
                    byte = base + sum(i * stride for i, stride in zip(place, page.stride_bytes, strict=False))
                    at = dict(zip(page.axes, place, strict=False))
                    if role == "ssm_state":
                        each = layer.heads // tp  # floor: exact here
                        whole = truth.tensor(index, role, (2, layer.heads, layer.head_dim, row_bytes))
                        row = whole[number, rank * each + at["head"], at["dim"]]
                    elif role == "conv_state":
                        whole = truth.tensor(index, role, (2, layer.conv_channels, row_bytes))
                        row = whole[number, channel(layer, tp, rank, at["channel"])]
                    else:
                        heads = 1 if isinstance(layer, LatentLayer) else layer.kv_heads
                        shared = role in ("key", "value", "key_block_scale", "value_block_scale")
                        token = number * spec.tokens_per_block + at["token"]
                        whole = truth.tensor(
                            -1 if role == "qsa_index_position" else index,
                            role,
                            (TOKENS, heads if shared else 1, row_bytes),
                        )
                        head = at["head"]
                        if shared and heads >= tp:
                            head += rank * (heads // tp)  # floor: exact here
                        elif shared:
                            head = rank // (tp // heads)  # floor: which replica group
                        row = whole[token, head]
                    yield buffer.pool, byte, row


def channel(layer: RecurrentLayer, tp: int, rank: int, local: int) -> int:
    """Return the model's channel of a rank's local one, by walking the sections."""
    inner, grouped = layer.heads * layer.head_dim, layer.groups * layer.state_dim
    start = 0
    for size in (grouped, grouped, inner) if layer.algorithm == "gdn" else (inner, grouped, grouped):
        each = size // tp  # floor: exact here
        if local < each:
            return start + rank * each + local
        local -= each
        start += size
    raise AssertionError("no such channel")


CASES = [
    ((ATTENTION, GDN, ATTENTION), "tp1", "tp2", {}, {}),
    ((ATTENTION, GDN, ATTENTION), "tp4", "adp2", {}, {}),
    ((PLAIN, MAMBA), "tp4", "tp2", {}, {}),
    ((MAMBA, PLAIN), "tp2", "tp8", {}, {}),
    ((PLAIN, PLAIN), "tp8", "tp2", {"kv_layout": "NHD"}, {"kv_layout": "NHD"}),
    ((PLAIN, PLAIN), "tp1", "tp4", {"tokens": 1}, {"tokens": 4}),
    ((PLAIN, PLAIN), "tp4", "tp2", {"tokens": 8}, {"tokens": 2}),
    ((PLAIN, PLAIN, PLAIN), "tp2pp3", "tp1pp2", {"kv": "nvfp4"}, {"kv": "nvfp4"}),
    ((LatentLayer(latent_dim=24, rope_dim=8), LatentLayer(latent_dim=24, rope_dim=8)), "tp2pp2", "tp4", {}, {}),
]


SPARSE = [(case, "trtllm-v2-qsa-packed") for case in CASES if ATTENTION in case[0]]
DENSE = [(case, name) for case in CASES if ATTENTION not in case[0] for name in ("trtllm-v2", "trtllm-v1")]


@pytest.mark.parametrize(("case", "allocator"), SPARSE + DENSE)
def test_bytes_arrive_where_one_cache_would_hold_them(case: Any, allocator: str) -> None:
    layers, one, other, more, less = case
    specs = model(*layers, layout=one, **more), model(*layers, layout=other, **less)
    sides = [lay_out(spec, 0, allocator) for spec in specs]
    plan = plan_transfer(*sides)
    assert plan.copies, plan.refusals
    arenas: list[dict[tuple[int, int], Bytes]] = []
    slots: list[dict[tuple[int, int], list[int]]] = []
    orders: list[Callable[[bool], list[int]]] = []
    for side, spec, shift in zip(sides, specs, (0, 1), strict=True):
        blocks = len(range(0, TOKENS, spec.tokens_per_block))
        orders.append(
            lambda recurrent, shift=shift, blocks=blocks: [shift + i for i in range(2 if recurrent else blocks)][::-1]
        )
        slots.append(
            {
                (layout.spec.rank, cycle): orders[-1](life.recurrent)
                for layout in side
                for cycle, life in enumerate(layout.life_cycles)
            }
        )
        arenas.append(
            {
                (layout.spec.rank, number): np.zeros(pool.size_bytes, np.uint8)
                for layout in side
                for number, pool in enumerate(layout.pools)
            }
        )
    truth = Truth()
    for layout in sides[0]:
        for pool, byte, row in elements(layout, truth, orders[0]):
            arenas[0][layout.spec.rank, pool][byte : byte + row.size] = row
    written = execute(byte_copies(plan.copies, *slots), *arenas)
    wanted = {key: np.zeros_like(arena) for key, arena in arenas[1].items()}
    total = 0
    for layout in sides[1]:
        for pool, byte, row in elements(layout, truth, orders[1]):
            wanted[layout.spec.rank, pool][byte : byte + row.size] = row
            total += row.size
    assert written == total, "as many bytes are written as the destination holds"
    for key, arena in arenas[1].items():
        assert np.array_equal(arena, wanted[key]), key


def test_the_proof_sees_every_single_change_of_a_plan() -> None:
    """Shift, shorten, drop or repeat any copy by one element: the proof must object each time."""
    pair = Pair(source=model(PLAIN, MAMBA, layout="tp2"), destination=model(PLAIN, MAMBA, layout="tp4"))
    source, destination = (lay_out(spec, 0, "trtllm-v2") for spec in comparable(pair))
    copies = plan_transfer(source, destination).copies
    assert not prove(source, destination, copies)
    for number, copy in enumerate(copies):
        others = (*copies[:number], *copies[number + 1 :])
        for changed in _changes(copy):
            findings = prove(source, destination, (*others, *changed))
            assert findings, (copy, changed)


def _changes(copy: Copy) -> Iterator[tuple[Copy, ...]]:
    yield ()
    yield (copy, copy)
    yield (replace(copy, run_bytes=copy.run_bytes - 2),)
    yield (replace(copy, source_offset=copy.source_offset + 2),)
    yield (replace(copy, destination_offset=copy.destination_offset + 2),)
    yield (replace(copy, source_offset=copy.source_offset + 2, destination_offset=copy.destination_offset + 2),)
    yield (replace(copy, source_slot_stride=0),)
    yield (replace(copy, destination_slot_stride=0),)


def test_a_copy_past_the_end_is_a_finding_and_an_error() -> None:
    pair = Pair(source=model(PLAIN, layout="tp1"), destination=model(PLAIN, layout="tp1"))
    source, destination = (lay_out(spec, 0, "trtllm-v2") for spec in comparable(pair))
    (copy,) = plan_transfer(source, destination).copies
    far = replace(copy, destination_offset=1 << 30)
    assert next(finding.rule for finding in prove(source, destination, (far,))) == "peer"
    arena = {(0, 0): np.zeros(source[0].pools[0].size_bytes, np.uint8)}
    with pytest.raises(IndexError, match="past the end"):
        execute(byte_copies((far,), {(0, 0): [0]}, {(0, 0): [0]}), arena, arena)


def test_twice_as_many_layers_make_twice_as_many_copies() -> None:
    """The plan grows with the views, and not with the square of anything."""
    counts = []
    for layers in (8, 16, 32):
        pair = Pair(source=model(*[PLAIN] * layers, layout="tp1"), destination=model(*[PLAIN] * layers, layout="tp4"))
        counts.append(len(judge_pair(pair, "trtllm-v2").plan.copies))
    assert counts == [8 * 2 * 4, 16 * 2 * 4, 32 * 2 * 4]


def calls(pair: Pair) -> int:
    """Return the function calls that judging ``pair`` takes: its work, whatever else the machine does."""
    count = 0

    def count_calls(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        verdict = judge_pair(pair, "trtllm-v2")
    finally:
        sys.setprofile(before)
    assert verdict.status == "clean"
    return count


@pytest.mark.parametrize("layer", [PLAIN, LatentLayer(latent_dim=128)])
def test_the_work_is_linear_in_views(layer: Layer) -> None:
    """From registration to the proof: four times the layers take at most four times the calls, of which some are for
    all layers together."""
    few, more, many = (
        calls(Pair(source=model(*[layer] * count, layout="tp1"), destination=model(*[layer] * count, layout="tp2pp4")))
        for count in (20, 40, 80)
    )
    assert more < 2.05 * few
    assert many < 2.05 * more


def test_the_work_does_not_grow_with_the_bytes_of_a_page() -> None:
    """A page of 64 times the bytes takes the same calls: bytes are moved by NumPy, as many as there are."""
    small, large = (
        calls(Pair(source=model(wide, layout="tp1"), destination=model(wide, layout="tp2")))
        for wide in (replace(PLAIN, head_dim=16, value_dim=16), replace(PLAIN, head_dim=1024, value_dim=1024))
    )
    assert large == small
