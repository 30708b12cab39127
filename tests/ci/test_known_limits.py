"""Known limits: each still breaks its rule, together they are rare, and outside of them the sound allocators are sound.

When an example of a limit passes, the limit is gone: take it out of the table and out of docs/known-limits.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import msgspec
import pytest

from kvsan.ci.campaign import Chunk, Options
from kvsan.ci.determinism import CHUNK_EXAMPLES
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import (
    INDEX_KEY,
    INDEX_POSITION,
    AttentionLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
)
from kvsan.model.spec import CacheSpec, Consumer, Draft, ParallelLayout, decode_spec
from kvsan.sim.allocators.faulty import base_of
from kvsan.sim.allocators.trtllm.limits import LIMITS as TRTLLM_LIMITS
from kvsan.sim.allocators.trtllm.limits import packed_plane_meets_pages, pages_exceed_index
from kvsan.sim.allocators.vllm.limits import LIMITS as VLLM_LIMITS
from kvsan.sim.limits import KnownLimit, faults_outside_limits, limits_of
from kvsan.sim.registry import ALLOCATORS, resolve
from kvsan.sim.rules import RULES
from kvsan.sim.verdict import judge

SOUND = ("trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed")
LIMITED = (*SOUND, "vllm-e1")
LIMITS = (*TRTLLM_LIMITS, *VLLM_LIMITS)
EXAMPLES = 2_000

PAIRS = [(limit, allocator) for limit in LIMITS for allocator in limit.allocators]


def shipped(pair: tuple[KnownLimit, str]) -> str:
    return f"{pair[1]}: {pair[0].name}"


@pytest.mark.parametrize(("limit", "allocator"), PAIRS, ids=map(shipped, PAIRS))
def test_a_limit_still_breaks_its_rule(limit: KnownLimit, allocator: str) -> None:
    spec = decode_spec(limit.example)
    if allocator == "trtllm-v2-qsa-packed" and any(isinstance(layer, LatentLayer) for layer in spec.layers):
        spec = K_V_INSTEAD_OF_LATENT
    broken = {fault.rule for fault in judge(spec, allocator).faults}
    if not broken & set(limit.rules):
        pytest.fail(f"{allocator} passes the example of {limit.name!r}: the limit is gone, delete it and its text")
    assert broken <= set(limit.rules)
    assert limit.matches(spec)
    outside, known, _ = faults_outside_limits(spec, resolve(allocator), limits_of(allocator))
    assert outside == []
    assert known >= 1


K_V_INSTEAD_OF_LATENT = decode_spec(
    b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"kv_format":"nvfp4","layers":['
    b'{"kind":"attention","kv_heads":1,"head_dim":32},{"kind":"attention","kv_heads":1,"head_dim":256}]}'
)
"""The same two sizes for a manager that knows no latent layers."""


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_the_example_of_a_limit_is_as_small_as_it_gets(limit: KnownLimit) -> None:
    """No layer can be left out, and no slot."""
    spec = decode_spec(limit.example)
    allocator = limit.allocators[0]
    smaller = [
        msgspec.structs.replace(spec, layers=spec.layers[:place] + spec.layers[place + 1 :])
        for place in range(len(spec.layers) if len(spec.layers) > 1 else 0)
    ]
    if (spec.slots or 0) > 1:
        smaller.append(msgspec.structs.replace(spec, slots=(spec.slots or 0) - 1))
    for candidate in smaller:
        assert not {fault.rule for fault in judge(candidate, allocator).faults} & set(limit.rules)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_a_limit_is_documented_and_speaks_of_what_there_is(limit: KnownLimit, root: Path) -> None:
    file, _, anchor = limit.anchor.partition("#")
    text = (root / file).read_text(encoding="utf-8")
    sections = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"): body
        for heading, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    }
    assert anchor in sections
    for allocator in limit.allocators:
        assert f"`{allocator}`" in sections[anchor]
        assert allocator in LIMITED
    assert f"`{limit.matches.__name__}`" in sections[anchor]
    assert set(limit.rules) <= {rule.name for rule in RULES}
    assert limit in limits_of(limit.allocators[0])


def test_only_sound_allocators_have_limits() -> None:
    """A fault has the limits of its base: what breaks there is not the fault."""
    for entry in ALLOCATORS:
        if entry.kind == "installed":  # their ledger is checked in tests/ci/engines
            continue
        base = base_of(entry.name) if entry.kind == "fault" else entry.name
        assert bool(limits_of(entry.name)) == (base in LIMITED)
        assert limits_of(entry.name) == limits_of(base)
    assert limits_of("my.module:allocate") == ()


@pytest.mark.slow
@pytest.mark.parametrize("allocator", SOUND)
def test_outside_its_limits_a_sound_allocator_has_no_finding_and_its_limits_are_rare(allocator: str) -> None:
    """Of 2,000 specs, as a campaign draws them, none fails, and at most a tenth lie inside a limit."""
    drawn: list[bytes] = []
    limits = limits_of(allocator)
    refused = 0
    for chunk in range(-(-EXAMPLES // CHUNK_EXAMPLES)):
        run = Chunk(Options(allocator=allocator, seed=2026), chunk, drawn.append)
        run.run(CHUNK_EXAMPLES)
        result = run.result()
        assert {rule: hit.spec.decode() for rule, hit in result.hits.items()} == {}
        refused += result.refused
    assert len(drawn) == EXAMPLES
    inside = [spec for spec in map(decode_spec, drawn) if any(limit.matches(spec) for limit in limits)]
    assert len(inside) * 10 <= EXAMPLES, f"{len(inside)} of {EXAMPLES} specs are inside known limits"
    if allocator != "trtllm-v1":
        assert len(inside) >= 20, "the strategies reach the limits"
    too_wide = [spec for spec in inside if not judge(spec, allocator).faults]
    assert len(too_wide) <= 2, "a limit that excuses what is no fault is too wide (under a quota it is a bound)"
    assert refused * 5 <= EXAMPLES, "at least four in five are laid out"


# Planes packed into a page of another's size: where it matters and where it does not.


def sparse_spec(layers: str, kv_format: str = "bf16") -> CacheSpec:
    """Return a spec of sparse (``s``: with an index plane as large as a K page), plain and recurrent layers."""
    dim = 128 * ElementFormat(kv_format).bits >> 4
    plane = SidePlane(role="index_key", dim=dim, format=ElementFormat.BF16)
    kinds: dict[str, Layer] = {
        "s": AttentionLayer(kv_heads=1, head_dim=128, side_planes=(plane,)),
        "p": AttentionLayer(kv_heads=1, head_dim=128),
        "r": RecurrentLayer(algorithm="short_conv", heads=128),
    }
    return CacheSpec(layers=tuple(kinds[kind] for kind in layers), kv_format=kv_format, slots=2)


@pytest.mark.parametrize(
    ("layers", "kv_format", "broken"),
    [
        ("s", "bf16", False),
        ("rs", "bf16", False),
        ("ps", "bf16", True),
        ("pprs", "bf16", True),
        ("sp", "bf16", True),
        ("psp", "bf16", True),
        ("srp", "bf16", True),
        ("sr", "bf16", False),
        ("ss", "bf16", False),
        ("pss", "fp8", False),
        ("sp", "fp8", True),
        ("s", "nvfp4", True),
        ("ps", "nvfp4", True),
    ],
)
def test_a_packed_plane_matters_where_pages_or_views_or_scales_have_to_keep_step(layers, kv_format, broken) -> None:
    spec = sparse_spec(layers, kv_format)
    assert bool(judge(spec, "trtllm-v2-qsa-packed").faults) == broken
    assert packed_plane_meets_pages(spec) == broken
    if layers == "ps" and kv_format == "bf16":
        assert not judge(msgspec.structs.replace(spec, slots=1), "trtllm-v2-qsa-packed").faults
        assert not packed_plane_meets_pages(msgspec.structs.replace(spec, slots=1))


def aimed_spec(random: Random) -> CacheSpec:
    """Return a small QSA model whose few sizes often meet."""
    heads, dim = random.choice([1, 2, 3, 4]), random.choice([3, 6, 16, 32, 48])
    formats = [ElementFormat.BF16, ElementFormat.UINT8, ElementFormat.FP32]
    planes: tuple[SidePlane, ...] = ()
    if random.random() < 0.8:
        dims = random.choice([1, 2, 3, 4, 8, 16, 24, 32])
        planes += (SidePlane(role=INDEX_KEY, dim=dims, format=random.choice(formats)),)
    if random.random() < 0.4:
        position = random.choice([1, 3, 4, 8])
        planes += (SidePlane(role=INDEX_POSITION, dim=position, format=random.choice(formats), scope="rank"),)
    plain = AttentionLayer(kv_heads=heads, head_dim=dim)
    paged = [plain] + [msgspec.structs.replace(plain, side_planes=some) for some in (planes, planes[:1], planes[1:])]
    kinds: list[Layer] = [*paged, RecurrentLayer(algorithm="short_conv", heads=64)]
    layers = tuple(random.choice(kinds) for _ in range(random.randint(1, 4)))
    parallel = ParallelLayout(tp=random.choice([1, 1, 2, 4]), pp=random.choice([1, min(2, len(layers))]))
    mode = random.choice(["none", "none", "folded", "separate"])
    return CacheSpec(
        layers=layers,
        kv_format=random.choice(["bf16", "fp8", "nvfp4", "fp32"]),
        tokens_per_block=random.choice([1, 2, 4]),
        slots=random.choice([1, 2, 3]),
        parallel=parallel,
        rank=random.randrange(parallel.world_size),
        draft=Draft(mode=mode, layers=(random.choice(paged),)) if mode != "none" else Draft(),
    )


def test_limits_say_exactly_where_the_packed_manager_breaks() -> None:
    random = Random(5)
    limits = limits_of("trtllm-v2-qsa-packed")
    broken = 0
    for _ in range(4_000):
        spec = aimed_spec(random)
        faults = judge(spec, "trtllm-v2-qsa-packed").faults
        assert any(limit.matches(spec) for limit in limits) == bool(faults), spec
        broken += bool(faults)
    assert broken >= 40


# More pages than an index counts: the predicate against the rule itself.


def pages_rule_fires(spec: CacheSpec, allocator: str) -> bool:
    return "int32" in {fault.rule for fault in judge(spec, allocator).faults}


@pytest.mark.parametrize("allocator", SOUND)
@pytest.mark.parametrize("bits", [32, 64])
def test_slots_beyond_the_index_are_told_exactly(allocator: str, bits: int) -> None:
    layer = AttentionLayer(kv_heads=1, head_dim=128)
    fired = []
    for layers in (1, 2, 3):
        most = (1 << 31) // (2 * layers)
        for slots in (1, most - 1, most, most + 1, 2 * most):
            spec = CacheSpec(
                layers=(layer,) * layers, tokens_per_block=1, slots=slots, consumer=Consumer(index_bits=bits)
            )
            assert pages_exceed_index(spec) == pages_rule_fires(spec, allocator)
            fired.append(pages_rule_fires(spec, allocator))
    assert any(fired) == (bits == 32)


@pytest.mark.parametrize("allocator", SOUND)
def test_a_quota_beyond_the_index_is_always_inside_the_limit(allocator: str) -> None:
    """The quota bounds the pages from above, so nothing escapes; the bound is reached within a factor of four."""
    fired = 0
    for dim in (1, 2, 3, 8, 128):
        for quota_bits in range(31, 44):
            spec = CacheSpec(
                layers=(AttentionLayer(kv_heads=1, head_dim=dim),), tokens_per_block=1, slots=None,
                quota_bytes=1 << quota_bits, kv_format="fp8",
            )  # fmt: skip
            if pages_rule_fires(spec, allocator):
                fired += 1
                assert pages_exceed_index(spec)
            elif pages_exceed_index(spec):
                more = msgspec.structs.replace(spec, quota_bytes=1 << (quota_bits + 2))
                assert pages_rule_fires(more, allocator)
    assert fired >= 10


def test_the_case_that_showed_the_limit_is_inside() -> None:
    """Six layers of one-byte pages under 6 GiB: found after 20,000 examples, and no fault of the layout."""
    spec = CacheSpec(
        layers=(AttentionLayer(kv_heads=6, head_dim=1),) * 6,
        kv_format="int8",
        tokens_per_block=1,
        slots=None,
        quota_bytes=6 << 30,
        parallel=ParallelLayout(tp=8),
    )
    assert pages_rule_fires(spec, "trtllm-v2")
    assert faults_outside_limits(spec, resolve("trtllm-v2"), limits_of("trtllm-v2"))[0] == []
