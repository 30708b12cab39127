"""The installed SGLang through the adapter: printed numbers, its model byte for byte, what it cannot be asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvsan.ci.engines.differential import run_differential
from kvsan.ci.engines.sglang import MODELS, SGLangAllocator
from kvsan.ci.engines.supervisor import EngineProcess
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, decode_spec
from kvsan.sim.checking import check
from kvsan.sim.engines.answer import View, read_answer
from kvsan.sim.engines.difference import differences
from kvsan.sim.engines.limits import LIMITS, Entry
from kvsan.sim.engines.sglang import request_of
from kvsan.sim.layout import Layout
from kvsan.sim.limits import faults_outside_limits, limits_of
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.sim.tensors.checking import check_tensors
from kvsan.sim.tensors.contract import TensorContract

replace = msgspec.structs.replace
AGREEING = 150
"""Specs that engine and model are compared on here; ``kvsan.ci.engines.differential`` takes any number."""
MHA = CacheSpec(
    layers=(AttentionLayer(kv_heads=8, head_dim=128),) * 2, tokens_per_block=16, slots=63,
    consumer=Consumer(kv_layout="NHD"),
)  # fmt: skip
MAMBA = RecurrentLayer(
    algorithm="mamba2", heads=128, head_dim=64, state_dim=128, groups=8, conv_kernel=4, ssm_format=ElementFormat.FP32
)
STATES = replace(MHA, layers=(MAMBA,) * 3, slots=4, state_slots=8, parallel=ParallelLayout(tp=2))
INDEX = SidePlane(role="index_key", dim=132, format=ElementFormat.UINT8)
SPARSE = replace(
    MHA, layers=(LatentLayer(latent_dim=592, rope_dim=64, side_planes=(INDEX,)),), kv_format=ElementFormat.FP8,
    tokens_per_block=64, slots=16,
)  # fmt: skip
SPECULATIVE = {
    "kind": "states", "manager": 0, "group": 2, "size": 8, "layers": [0, 1, 2], "conv": [5120, 3],
    "temporal": [64, 64, 128], "kernel": 4, "conv_dtype": "bfloat16", "dtype": "float32", "kda": False,
    "envelope": False, "draft_tokens": 3, "spec_slots": 4,
}  # fmt: skip
UNIFIED = {
    "layers": 8, "heads": 8, "dim": 128, "state_layers": 40, "conv": [5120, 3], "conv_dtype": "bfloat16",
    "temporal": [64, 64, 128], "dtype": "float32", "bytes": 512 << 20,
}  # fmt: skip


@pytest.fixture
def sglang(sglang_process: EngineProcess) -> Callable[[str], SGLangAllocator]:
    return lambda name: SGLangAllocator(name, sglang_process)


def shown(layout: Layout, layer: int, role: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a buffer's offset in bytes, and shape and strides in elements, slots first."""
    buffer = next(held for held in layout.buffers if (held.layer, held.role) == (layer, role))
    item = buffer.page.format.container_bytes
    strides = [stride // item for stride in (buffer.slot_stride_bytes, *buffer.page.stride_bytes)]
    return buffer.offset_bytes, (buffer.slot_count, *buffer.page.shape), tuple(strides)


def pool(process: EngineProcess, **asked: Any) -> list[View]:
    """Return the tensors of one pool, as the engine tells them."""
    answer = process.ask({"pools": [{"manager": 0, "group": 0, "layers": [0], **asked}]})
    assert "error" not in answer, answer
    return msgspec.convert(answer["views"], list[View])


@pytest.mark.engine
def test_rows_that_are_no_whole_pages_are_padded_between_k_and_v(sglang_process: EngineProcess) -> None:
    """1,000 tokens and a page: 1,016 rows, and V begins after 1,024."""
    sizes = {"size": 1000, "tokens": 16, "dtype": "bfloat16", "heads": 8, "dim": 128, "value_dim": 128, "fp4": False}
    keys, values = pool(sglang_process, kind="attention", **sizes)
    assert (keys.shape, keys.stride, keys.offset) == ((1016, 8, 128), (1024, 128, 1), 0)
    assert (values.shape, values.offset, values.allocation) == ((1016, 8, 128), 2097152, keys.allocation)
    answer = sglang_process.ask({"pools": [{"manager": 0, "group": 0, "layers": [0], "kind": "attention", **sizes}]})
    assert answer["allocations"] == [4194304]


@pytest.mark.engine
def test_the_printed_pools(sglang: Callable[[str], SGLangAllocator]) -> None:
    """fp8 with two head dims, latent rows, sparse latent rows, nvfp4."""
    engine = sglang("sglang-engine")
    fp8 = replace(MHA, layers=(AttentionLayer(kv_heads=4, head_dim=192, value_dim=128),), kv_format="fp8", slots=64)
    layout = engine(fp8)
    assert [held.size_bytes for held in layout.pools] == [1040 * 4 * 192, 1040 * 4 * 128]
    latent = replace(MHA, layers=(LatentLayer(latent_dim=512, rope_dim=64),), tokens_per_block=64, slots=16)
    assert engine(latent).pools[0].size_bytes == 1088 * 576 * 2
    layout = engine(SPARSE)
    assert [held.size_bytes for held in layout.pools] == [1088 * 656, 17 * 8448]
    nvfp4 = replace(MHA, layers=MHA.layers[:1], kv_format=ElementFormat.NVFP4, slots=64)
    assert [held.size_bytes for held in engine(nvfp4).pools] == [1040 * 8 * 64] * 2 + [1040 * 64] * 2
    for spec in (fp8, latent, SPARSE, nvfp4):
        assert check(engine(spec)) == []


@pytest.mark.engine
def test_the_printed_states(sglang: Callable[[str], SGLangAllocator]) -> None:
    layout = sglang("sglang-engine")(STATES)
    assert shown(layout, 0, "conv_state")[1:] == ((9, 5120, 3), (15360, 3, 1))
    assert shown(layout, 1, "ssm_state") == (9 * 524288 * 4, (9, 64, 64, 128), (524288, 8192, 128, 1))
    layout = sglang("sglang-engine-envelope")(STATES)
    assert [held.size_bytes for held in layout.pools] == [57452544]
    assert shown(layout, 1, "conv_state") == (15360 * 2, (9, 5120, 3), (3191808, 3, 1))
    assert shown(layout, 0, "ssm_state") == (92160, (9, 64, 64, 128), (1595904, 8192, 128, 1))


class Tensor:
    """A tensor of the engine, or its slots from ``first`` on, in NumPy's protocol; there is no memory behind it."""

    def __init__(self, view: View, first: int = 0, count: int | None = None) -> None:
        start = ((1 + view.allocation) << 44) + view.offset + first * view.stride_bytes[0]
        self.__array_interface__ = {
            "version": 3, "data": (start, False), "typestr": f"|V{view.item}", "strides": view.stride_bytes,
            "shape": (view.shape[0] - first if count is None else count, *view.shape[1:]),
        }  # fmt: skip


@pytest.mark.engine
def test_windows_of_draft_tokens_overlap_on_purpose(sglang_process: EngineProcess) -> None:
    """One buffer of 5 columns serves three windows of 3: 768,000 B instead of 1,382,400."""
    answer = sglang_process.ask({"pools": [SPECULATIVE]})
    views = msgspec.convert(answer["views"], list[View])
    windows = [view for view in views if view.part == 2]
    assert [view.shape for view in windows] == [(5, 3, 5120, 3)] * 3
    assert {view.stride for view in windows} == {(25600, 1, 5, 1)}
    assert [view.offset for view in windows] == [0, 256000, 512000]
    assert answer["allocations"][windows[0].allocation] == 768000
    assert [view.shape for view in views if view.part == 3] == [(5, 3, 64, 64, 128)] * 3
    tensors = {f"{view.name}.{view.part}": Tensor(view) for view in views}
    overlapping = {f"{view.name}.2" for view in windows}
    found = check_tensors(tensors)
    assert len(found) == len(overlapping)
    assert all(any(name in finding.message for name in overlapping) for finding in found)
    assert check_tensors(tensors, contract=TensorContract(self_overlap=tuple(sorted(overlapping)))) == []


@pytest.mark.engine
def test_two_pools_share_a_buffer_from_its_two_ends(sglang_process: EngineProcess) -> None:
    """Every view spans all bytes; the ids that allocators give out keep rows and states apart, up to a frontier."""
    answer = sglang_process.ask({"unified": UNIFIED})
    assert answer["entries"] == [32768, 85114880]
    assert answer["slots"] == [16384, 6]
    assert answer["first"] == [2598, 1]
    views = msgspec.convert(answer["views"], list[View])
    assert {view.stride for view in views if view.group == 0} == {(16384, 128, 1)}
    assert next(view for view in views if (view.name, view.part) == ("1", 1)).offset == 6144
    conv, temporal = (next(view for view in views if view.group == 1 and view.part == part) for part in (0, 1))
    assert (conv.stride, conv.offset, temporal.offset) == ((42557440, 3, 1), 0, 1228800)
    rows, states = (-(-4 * 85114880 // 32768), 4)  # four states' bytes from the low end are rows of the other pool
    apart: dict[str, object] = {}
    for view in views:
        if view.group == 0:
            apart[f"{view.name}.{view.part}"] = Tensor(view, 2598, rows - 2598)
        else:
            apart[f"{view.name}.{view.part}"] = Tensor(view, states + 1, 6 - states - 1)
    assert check_tensors(apart) == []
    lower = next(view for view in views if view.group == 1)
    apart[f"{lower.name}.{lower.part}"] = Tensor(lower, states - 1, 1)
    assert check_tensors(apart), "one state below the frontier lies on rows"


@pytest.mark.engine
def test_the_allocator_hands_out_from_page_one(sglang_process: EngineProcess) -> None:
    answer = sglang_process.ask({"allocate": {"size": 1024, "tokens": 16, "needs": [32]}})
    assert answer["given"] == [list(range(16, 48))]
    assert answer["available"] == 992


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(MODELS))
def test_engine_and_model_agree_byte_for_byte(sglang: Callable[[str], SGLangAllocator], name: str) -> None:
    found = run_differential(sglang(name), AGREEING, seed=3)
    assert found.differences == []
    assert found.kinds["agree"] > AGREEING // 2


OURS = [(limit, name) for limit in LIMITS for name in limit.allocators if name in MODELS]


@pytest.mark.engine
@pytest.mark.parametrize(("limit", "name"), OURS, ids=[f"{name}: {limit.name}" for limit, name in OURS])
def test_what_the_engine_gets_wrong_it_still_gets_wrong(
    sglang: Callable[[str], SGLangAllocator], limit: Entry, name: str
) -> None:
    allocator = sglang(name)
    if allocator.release not in limit.releases:
        pytest.skip(f"was found in {', '.join(limit.releases)}, here is {allocator.engine()}")
    outside, known, _ = faults_outside_limits(decode_spec(limit.example), allocator, limits_of(name, allocator.release))
    assert known, f"{allocator.engine()} handles {limit.name!r}: delete the entry and its text"
    assert outside == []


def test_an_assertion_in_words_is_a_refusal(fake_process: Callable[..., EngineProcess]) -> None:
    """That is how its pools refuse; one without words explains nothing."""
    for words, rule in (("'misaligned'", "rejected"), ("''", "unexplained-rejection")):
        text = f"\ndef change(answer):\n    raise AssertionError({words})\n"
        with pytest.raises(Rejected) as refused:
            SGLangAllocator("sglang-engine", fake_process(fake_answer(ONE) + text))(ONE)
        assert refused.value.rule == rule


def fake_answer(spec: CacheSpec) -> str:
    """Return the text of a function that answers what SGLang 0.5.23 does for K and V of one layer."""
    (asked,) = request_of(spec, envelope=False)["pools"]
    rows = asked["size"] + asked["tokens"]
    shape, stride = [rows, asked["heads"], asked["dim"]], [asked["heads"] * asked["dim"], asked["dim"], 1]
    half = math.prod(shape) * 2
    view = {
        "name": "0", "group": 0, "allocation": 0, "axes": ["row", "head", "dim"], "shape": shape, "stride": stride,
        "item": 2,
    }  # fmt: skip
    views = [{**view, "part": part, "offset": part * half} for part in (0, 1)]
    return f"\ndef answer(request, greeting):\n    return change({{'allocations': [{2 * half}], 'views': {views!r}}})\n"


ONE = replace(MHA, layers=MHA.layers[:1])
SAME = "\ndef change(answer):\n    return answer\n"


def test_tensors_become_a_layout_equal_to_the_models(fake_process: Callable[..., EngineProcess]) -> None:
    layout = SGLangAllocator("sglang-engine", fake_process(fake_answer(ONE) + SAME))(ONE)
    assert list(differences(layout, allocate(ONE, "sglang"))) == []
    assert check(layout) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("answer['views'][1]['offset'] -= 2048", "layer 0's value is at byte 2095104"),
        ("answer['views'][0]['stride'][0] += 1", "layer 0's key is at byte 0, 64 slots by 32800"),
        ("answer['allocations'] = [4194304 + 64 * 2]", "4194432 B in sglang-engine"),
    ],
)
def test_whatever_moved_is_a_difference(fake_process: Callable[..., EngineProcess], change: str, words: str) -> None:
    text = f"\ndef change(answer):\n    {change}\n    return answer\n"
    layout = SGLangAllocator("sglang-engine", fake_process(fake_answer(ONE) + text))(ONE)
    assert any(words in sentence for sentence in differences(layout, allocate(ONE, "sglang")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("raise RuntimeError('no such pool')", "raised RuntimeError: no such pool"),
        ("os._exit(7)", "ended with status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("answer['views'][0]['shape'][2] = 64", "made tensor 0 of layer 0 with 8 head, 64 dim of 2 B"),
    ],
)
def test_what_an_engine_does_wrong_is_a_fault(
    fake_process: Callable[..., EngineProcess], change: str, words: str
) -> None:
    text = f"\ndef change(answer):\n    {change}\n    return answer\n"
    allocator = SGLangAllocator("sglang-engine", fake_process(fake_answer(ONE) + text))
    with pytest.raises(Rejected) as refused:
        allocator(ONE)
    assert words in refused.value.message
    assert refused.value.rule == "unexplained-rejection"
    assert refused.value.supported


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (MHA.layers[0], AttentionLayer(kv_heads=4, head_dim=64))}, "layers of one geometry"),
        ({"layers": (MHA.layers[0], LatentLayer(latent_dim=64))}, "layers of one geometry"),
        (
            {"layers": (replace(MHA.layers[0], window=8), LatentLayer(latent_dim=64))},
            "latent layers beside others",
        ),
        ({"layers": (LatentLayer(latent_dim=64, side_planes=(INDEX,)),)}, "pages of 64 tokens"),
    ],
)
def test_what_the_engine_has_no_pool_for_is_not_asked(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Rejected, match=words) as refused:
        SGLangAllocator("sglang-engine")(replace(MHA, **change))
    assert not refused.value.supported


def test_an_answer_that_makes_no_sense_is_an_error(fake_process: Callable[..., EngineProcess]) -> None:
    from kvsan.model.errors import SpecError

    text = "\ndef change(answer):\n    answer['views'][0]['name'] = '9'\n    return answer\n"
    with pytest.raises(SpecError, match="which it was not asked for"):
        SGLangAllocator("sglang-engine", fake_process(fake_answer(ONE) + text))(ONE)
    with pytest.raises(SpecError, match="no plan"):
        read_answer({"blocks": 1, "allocations": [], "groups": [], "views": [{}]}, "SGLang")
