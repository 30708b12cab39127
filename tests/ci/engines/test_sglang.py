"""The installed SGLang through the adapter: its printed numbers, its models byte for byte, the ledger, and crashes.

``python test_sglang.py FILE`` records the answers that ``tests/sim/engines/test_sglang.py`` reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.campaign import Options, run_campaign
from kvsan.ci.cases import load_case
from kvsan.ci.engines import comparison, sglang
from kvsan.ci.engines.differential import run_differential
from kvsan.ci.engines.installed import SGLANG, Installed
from kvsan.ci.engines.sglang import VARIANTS, SglangAllocator
from kvsan.ci.engines.supervisor import EngineProcess
from kvsan.ci.replay.messages import LayoutJob
from kvsan.cli.replay_input import Source, prepare
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, decode_spec, encode_spec
from kvsan.sim.checking import check
from kvsan.sim.engines.answer import read_answer
from kvsan.sim.engines.limits import LIMITS
from kvsan.sim.engines.sglang import layout_of
from kvsan.sim.layout import Layout
from kvsan.sim.limits import faults_outside_limits, limits_of
from kvsan.sim.verdict import judge

AGREEING = 60
"""Specs that engine and model are compared on here; ``kvsan.ci.engines.differential`` takes any number."""

replace = msgspec.structs.replace
Engine = Callable[[str], SglangAllocator]
MHA = CacheSpec(
    layers=(AttentionLayer(kv_heads=8, head_dim=128),) * 2, tokens_per_block=16, slots=62,
    consumer=Consumer(kv_layout="NHD"),
)  # fmt: skip
MAMBA = RecurrentLayer(
    algorithm="mamba2", heads=128, head_dim=64, state_dim=128, groups=8, conv_kernel=4, ssm_format=ElementFormat.FP32
)
STATES = replace(MHA, layers=(MAMBA,) * 3, slots=4, state_slots=8, parallel=ParallelLayout(tp=2))
PLANE = SidePlane(role="index_key", dim=132, format=ElementFormat.UINT8)
SPARSE = replace(
    MHA, layers=(LatentLayer(latent_dim=656, side_planes=(PLANE,)),), kv_format=ElementFormat.FP8,
    tokens_per_block=64, slots=16,
)  # fmt: skip
UNIFIED = replace(MHA, layers=MHA.layers * 4 + (MAMBA,) * 40, tokens_per_block=1, parallel=ParallelLayout(tp=2))


@pytest.fixture(scope="module")
def engine(sglang_process: EngineProcess) -> Engine:
    """Return a maker of allocators of the installed engine."""
    return lambda name: SglangAllocator(name, sglang_process)


def asked(engine: Engine, name: str, spec: CacheSpec, **changes: int) -> Layout:
    """Return the layout of what the engine answers to the request for ``spec``, changed."""
    allocator = engine(name)
    request = allocator.request(spec) | changes
    return layout_of(spec, read_answer(allocator.process.ask(request), allocator.engine()), name, allocator.engine())


def view(layout: Layout, layer: int, role: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a buffer's offset in bytes, and shape and strides in elements, slots first."""
    [held] = [buffer for buffer in layout.buffers if (buffer.layer, buffer.role) == (layer, role)]
    item = held.page.format.container_bytes
    strides = [stride // item for stride in (held.slot_stride_bytes, *held.page.stride_bytes)]
    return held.offset_bytes, (held.slot_count, *held.page.shape), tuple(strides)


def sizes(layout: Layout) -> list[int]:
    return [pool.size_bytes for pool in layout.pools]


@pytest.mark.engine
def test_k_and_v_of_one_shape_are_halves_and_reported_without_their_padding(engine: Engine) -> None:
    """1,000 slots and a sink of 16: rows padded to 1,024, V after 2,097,152 B, two storages of 4,194,304 B."""
    layout = asked(engine, "sglang-engine", MHA, size=1000)
    assert sizes(layout) == [4194304] * 2
    assert view(layout, 0, "key") == (0, (63, 16, 8, 128), (16384, 1024, 128, 1))
    assert view(layout, 1, "value") == (2097152, (63, 16, 8, 128), (16384, 1024, 128, 1))
    assert layout.notes[1] == (
        f"the engine reports {4161536 * 2} B for its target pools, whose storages take 8388608 B"
    )
    assert check(layout) == []


@pytest.mark.engine
def test_k_and_v_of_two_shapes_are_two_storages(engine: Engine) -> None:
    layer = AttentionLayer(kv_heads=4, head_dim=192, value_dim=128)
    layout = engine("sglang-engine")(replace(MHA, layers=(layer,), kv_format=ElementFormat.FP8, slots=64))
    assert sizes(layout) == [1040 * 4 * 192, 1040 * 4 * 128]
    assert check(layout) == []


@pytest.mark.engine
def test_latent_rows_and_index_keys_by_page(engine: Engine) -> None:
    rows = replace(SPARSE, layers=(LatentLayer(latent_dim=512, rope_dim=64),), kv_format=ElementFormat.BF16)
    assert sizes(engine("sglang-engine")(rows)) == [1088 * 576 * 2]
    layout = engine("sglang-engine")(SPARSE)
    assert sizes(layout) == [1088 * 656, 17 * 8448]
    assert check(layout) == []


@pytest.mark.engine
def test_four_bit_pages_have_scales_apart(engine: Engine) -> None:
    layout = engine("sglang-engine")(replace(MHA, layers=MHA.layers[:1], kv_format=ElementFormat.NVFP4, slots=64))
    assert sizes(layout) == [1040 * 8 * 64, 1040 * 8 * 64, 1040 * 64, 1040 * 64]
    assert check(layout) == []


@pytest.mark.engine
def test_states_lie_layer_by_layer(engine: Engine) -> None:
    """conv (3, 9, 5120, 3) bf16, temporal (3, 9, 64, 64, 128) fp32."""
    layout = engine("sglang-engine")(STATES)
    assert sizes(layout) == [3 * 9 * 5120 * 3 * 2, 3 * 9 * 64 * 64 * 128 * 4]
    assert view(layout, 2, "conv_state") == (2 * 9 * 15360 * 2, (9, 5120, 3), (15360, 3, 1))
    assert check(layout) == []


@pytest.mark.engine
def test_an_envelope_is_one_storage(engine: Engine) -> None:
    layout = engine("sglang-engine-envelope")(STATES)
    assert sizes(layout) == [57452544]
    assert view(layout, 0, "conv_state") == (0, (9, 5120, 3), (3191808, 3, 1))
    assert view(layout, 1, "conv_state")[0] == 15360 * 2
    assert view(layout, 0, "ssm_state") == (92160, (9, 64, 64, 128), (1595904, 8192, 128, 1))
    assert view(layout, 1, "ssm_state")[0] == 92160 + 524288 * 4
    assert check(layout) == []


@pytest.mark.engine
def test_windows_of_draft_tokens_overlap_as_they_are_meant_to(engine: Engine) -> None:
    """(3, 5, 3, 5120, 3) by (128000, 25600, 1, 5, 1) over 768,000 B; temporal states (3, 5, 3, 64, 64, 128) apart."""
    layout = engine("sglang-engine-speculative")(STATES)
    assert sizes(layout)[2:] == [768000, 3 * 5 * 3 * 64 * 64 * 128 * 4]
    assert view(layout, 0, "draft_conv_state") == (0, (5, 3, 5120, 3), (25600, 1, 5, 1))
    assert view(layout, 1, "draft_conv_state")[0] == 128000 * 2
    assert [held.page.self_overlap for held in layout.buffers if held.role == "draft_conv_state"] == [True] * 3
    assert check(layout) == []


@pytest.mark.engine
def test_a_unified_buffer_has_two_ends(engine: Engine) -> None:
    """512 MiB: entries of 32,768 and 85,114,880 B, 16,384 and 6 slots, the first in use 2,598 and 1."""
    spec = replace(UNIFIED, layers=tuple([replace(layer, kv_heads=16) if isinstance(layer, AttentionLayer) else layer
                   for layer in UNIFIED.layers]), slots=7000, state_slots=2)  # fmt: skip
    allocator = engine("sglang-engine-unified")
    answer = allocator.process.ask(allocator.request(spec) | {"unified_bytes": 512 << 20})
    assert answer["allocations"] == [512 << 20]
    assert answer["reported"] == {
        "full.max_slots": 16384, "states.max_slots": 6, "full.min_slot": 2598, "states.min_slot": 1,
        "full.entry_bytes": 32768, "states.entry_bytes": 85114880,
    }  # fmt: skip
    layout = layout_of(spec, read_answer(answer, "SGLang"), "sglang-engine-unified", "SGLang")
    assert view(layout, 0, "key") == (0, (7000, 1, 8, 128), (16384, 16384, 128, 1))
    assert view(layout, 1, "value")[0] == 6144
    assert view(layout, 8, "conv_state") == (0, (2, 5120, 3), (42557440, 3, 1))
    assert view(layout, 8, "ssm_state")[0] == 1228800
    sink, pages, free, states = sizes(layout)
    assert (sink, pages, states) == (2598 * 32768, 7000 * 32768, (512 << 20) - 4 * 85114880)
    assert sink + pages + free == 4 * 85114880
    assert check(layout) == []


@pytest.mark.engine
def test_pages_are_handed_out_from_the_first_after_the_sink(engine: Engine) -> None:
    process = engine("sglang-engine").process
    answer = process.ask({"alloc": {"size": 1024, "tokens": 16, "count": 32}})
    assert (answer["slots"], answer["available"]) == (list(range(16, 48)), 992)


@pytest.mark.engine
@pytest.mark.parametrize("name", VARIANTS)
def test_the_engine_and_its_model_agree_byte_for_byte(engine: Engine, name: str) -> None:
    found = run_differential(engine(name), AGREEING)
    assert found.differences == []
    assert found.kinds["agree"] >= AGREEING // 2
    assert sum(found.kinds.values()) + sum(found.known.values()) == AGREEING


PAIRS = [(limit, name) for limit in LIMITS for name in limit.allocators if name in VARIANTS]


@pytest.mark.engine
@pytest.mark.parametrize(("limit", "name"), PAIRS, ids=[f"{name}: {limit.name}" for limit, name in PAIRS])
def test_what_the_engine_gets_wrong_it_still_gets_wrong(engine: Engine, limit, name: str) -> None:
    """An entry of the ledger that passes is out of date: take it out of the ledger and of docs/findings.md."""
    allocator = engine(name)
    if allocator.release not in limit.releases:
        pytest.skip(f"was found in {', '.join(limit.releases)}, here is {allocator.engine()}")
    spec = decode_spec(limit.example)
    outside, known, _ = faults_outside_limits(spec, allocator, limits_of(name, allocator.release))
    assert known, f"{allocator.engine()} handles {limit.name!r}: delete the entry and its text"
    assert outside == []
    assert any(limit.excuses(fault) for fault in judge(spec, allocator).faults)


@pytest.mark.engine
def test_a_replay_carries_out_the_engines_own_strides(engine: Engine, tmp_path: Path, monkeypatch) -> None:
    process = engine("sglang-engine").process
    monkeypatch.setenv(SGLANG.variable, sys.executable)
    monkeypatch.setattr(comparison, "warm_process", lambda engine: process)
    (tmp_path / "spec.json").write_bytes(encode_spec(replace(MHA, slots=2)))
    [prepared] = prepare([Source(str(tmp_path / "spec.json"), True)], {}, "sglang-engine")
    assert isinstance(prepared.item, LayoutJob)
    assert prepared.item.layout.notes[0] == "pools made by SGLang 0.5.23"


@pytest.mark.parametrize(
    ("error", "words", "rule"),
    [("AssertionError", "odd entry", "rejected"), ("AssertionError", "", "unexplained-rejection")],
)
def test_an_assertion_in_words_is_a_refusal(
    fake_process: Callable[..., EngineProcess], error: str, words: str, rule: str
) -> None:
    process = fake_process(f"def answer(request, greeting):\n    raise {error}({words!r})\n")
    [fault] = judge(replace(MHA, slots=2), SglangAllocator("sglang-engine", process)).faults
    assert fault.rule == rule


BAD = """
def answer(request, greeting):
    pages = request["pages"]
    if pages % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if pages % 3 == 1:
        os._exit(9)
    time.sleep(600)
"""


@pytest.fixture
def crashing(fake_process: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put an engine that is killed, ends or hangs in place of the installed one."""
    process = fake_process(BAD, seconds=1)
    monkeypatch.setattr(sglang, "SGLANG", Installed("SGLang", "sglang", SGLANG.variable, "fake_engine", "recipe"))
    monkeypatch.setenv(SGLANG.variable, sys.executable)
    monkeypatch.setattr(comparison, "warm_process", lambda engine: process)
    return None


@pytest.mark.usefixtures("crashing")
@pytest.mark.parametrize(
    ("slots", "words"), [(3, "ended by SIGKILL"), (4, "ended with status 9"), (2, "no answer after 1 s")]
)
def test_the_end_of_the_engines_process_is_a_fault_of_the_spec(slots: int, words: str) -> None:
    [fault] = judge(replace(MHA, slots=slots), sglang.allocate_sglang).faults
    assert fault.rule == "unexplained-rejection"
    assert words in fault.message


@pytest.mark.usefixtures("crashing")
def test_a_campaign_outlives_the_engine_and_saves_what_ended_it(tmp_path: Path) -> None:
    options = Options(allocator="sglang-engine", examples=6, seed=3, cases=tmp_path / "cases", reduce=False)
    result = run_campaign(options)
    assert result.examples == 6
    [fault] = [fault for fault in result.faults if fault.rule == "unexplained-rejection"]
    assert fault.case is not None
    [saved] = (tmp_path / "cases").iterdir()
    again = judge(load_case(saved).input, "sglang-engine")
    assert [found.rule for found in again.faults] == ["unexplained-rejection"]


def record(path: Path) -> None:
    """Write the engine's answers to small requests, one of each kind of pool."""
    small = replace(STATES, layers=(RecurrentLayer(algorithm="mamba2", heads=4, head_dim=2, state_dim=4, groups=2),
                    MHA.layers[0], AttentionLayer(kv_heads=4, head_dim=8, window=4)))  # fmt: skip
    latent = replace(SPARSE, slots=2)
    ends = replace(small, layers=(*small.layers[:2], small.layers[0]))
    specs = [
        ("sglang-engine", replace(small, consumer=Consumer(kv_layout="HND"))),
        ("sglang-engine", latent),
        ("sglang-engine", replace(MHA, kv_format=ElementFormat.NVFP4, slots=2)),
        ("sglang-engine-envelope", small),
        ("sglang-engine-speculative", small),
        ("sglang-engine-unified", ends),
    ]
    found = []
    for name, spec in specs:
        allocator = SglangAllocator(name)
        answer = allocator.process.ask(allocator.request(spec))
        del answer["seconds"]
        found.append({"allocator": name, "spec": json.loads(encode_spec(spec)), "answer": answer})
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
