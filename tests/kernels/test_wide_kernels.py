"""Kernels that read rows in pieces of 16 bytes: addresses through the interpreter, rounding bit by bit."""

from __future__ import annotations

import functools
import importlib.util

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:  # importing it here would settle too early that kernels are compiled
    pytest.skip("triton is not installed", allow_module_level=True)

from kvsan.kernels.device import Device, open_device  # noqa: E402
from kvsan.kernels.trials.shape import Shape  # noqa: E402
from kvsan.model.formats import ElementFormat  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, on rows that see nothing

FORMATS = (ElementFormat.BF16, ElementFormat.FP16, ElementFormat.FP32, ElementFormat.FP8, ElementFormat.NVFP4)
SHAPES = (
    Shape(heads=2, group=3, head_dim=64, value_dim=64, page_tokens=32, lengths=(130, 1, 0)),
    Shape(heads=1, group=17, head_dim=64, value_dim=128, page_tokens=16, lengths=(70, 64), row_gap=64, kv_layout="NHD"),
    Shape(heads=3, head_dim=128, value_dim=64, page_tokens=48, lengths=(49,), slot_gap=128, planes_apart=True),
    Shape(heads=1, head_dim=64, value_dim=64, page_tokens=64, lengths=(200, 90), window=70, sinks=5),
    Shape(heads=1, head_dim=64, value_dim=64, page_tokens=32, lengths=(150,), window=3, unit=0.5, page_gap=64),
)


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_wide_decode_agrees_with_float64(device: Device, shape: Shape, format: ElementFormat) -> None:
    """In one split, which writes the output itself, and in several, which are joined."""
    from kvsan.kernels.attention.decode import decode, reads_wide
    from kvsan.kernels.trials.attention import prepare, trial_decode

    shape = msgspec.structs.replace(shape, format=format)
    assert reads_wide(prepare(device, shape, 1).problem)
    for split_tokens in (64, 256):
        outcome = trial_decode(device, shape, functools.partial(decode, wide=True, split_tokens=split_tokens))
        assert outcome.passed, f"{outcome.text} of {shape} in splits of {split_tokens}"


@pytest.mark.parametrize(
    "change",
    [{"page_tokens": 24}, {"row_gap": 1}, {"element_step": 2}, {"head_dim": 60}],
    ids=["pages of 24 tokens", "a gap of one", "elements apart", "a dim of 60"],
)
def test_what_cannot_be_read_in_pieces(device: Device, change: dict[str, int]) -> None:
    from kvsan.kernels.attention.decode import reads_wide
    from kvsan.kernels.trials.attention import prepare

    shape = Shape(heads=2, head_dim=64, value_dim=64, page_tokens=32, lengths=(40,))
    assert reads_wide(prepare(device, shape, 1).problem)
    assert not reads_wide(prepare(device, msgspec.structs.replace(shape, **change), 1).problem)


@pytest.mark.parametrize("unit", [1.0, 0.25, 0.037])
def test_words_are_quantised_as_elements_are(device: Device, unit: float) -> None:
    """bf16 goes through words where the unit is a power of two, and leaves the bytes that fp32 leaves."""
    from kvsan.kernels.paged.views import LayoutMemory, PagedPlane
    from kvsan.kernels.quantize.rows import append
    from kvsan.kernels.trials.filling import hold_pages
    from kvsan.kernels.trials.layouts import kv_layout
    from kvsan.sim.layout import KEY, KEY_SCALE

    shape = Shape(format=ElementFormat.NVFP4, heads=2, head_dim=64, value_dim=64, page_tokens=4, lengths=(9,))
    held = hold_pages(shape.lengths, shape.page_tokens, 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.randint(-12, 10, (9, 2, 4, 1), generator=generator).float())
    values = (torch.randn(9, 2, 4, 16, generator=generator) * sizes).flatten(2).to(torch.bfloat16)
    values[0, 0, :3] = torch.tensor([0.0, -0.0, 1e-30])
    values[1, 1] = 0.0
    bytes_ = []
    for given in (values, values.float()):
        memory = LayoutMemory(device, kv_layout(shape, held.slots))
        views = {buffer.role: memory.of_buffer(buffer) for buffer in memory.layout.buffers}
        requests, positions = torch.zeros(9, dtype=torch.int32), torch.arange(9, dtype=torch.int32)
        append(PagedPlane(views[KEY], views[KEY_SCALE], unit), given, requests, positions, held.table)
        bytes_.append([views[role].storage.clone() for role in (KEY, KEY_SCALE)])
    assert all(torch.equal(one, other) for one, other in zip(*bytes_, strict=True))


def midpoints_passed(quotient: np.ndarray) -> np.ndarray:
    """Return e2m1 codes, to nearest, ties to even, by comparing float64 with the midpoints."""
    code = (quotient > 0.25).astype(int) + (quotient >= 0.75) + (quotient > 1.25) + (quotient >= 1.75)
    return code + (quotient > 2.5) + (quotient >= 3.5) + (quotient > 5.0)


@pytest.mark.parametrize("ulps", [-3, 0, 3])
def test_rounding_through_fp16_is_exact_for_every_bf16_and_scale(ulps: int) -> None:
    """The arithmetic that a GPU does for words, bit by bit, however its reciprocal was rounded."""
    values = (np.arange(0, 0x7F80, dtype=np.uint32) << 16).view(np.float32)
    for byte in range(1, 127):
        exponent, fraction = byte >> 3, byte & 7
        scale = np.ldexp(fraction if exponent == 0 else 8 + fraction, max(exponent, 1) - 10)
        inverse = np.float32(np.divide(2.0**-14, scale)) * np.float32(1 + ulps * 2.0**-24)
        bits = np.minimum((values * inverse).astype(np.float16), np.float16(6 * 2.0**-14)).view(np.uint16).astype(int)
        codes = (bits + 0xFF + ((bits >> 9) & 1)) >> 9
        wanted = midpoints_passed(np.divide(values.astype(np.float64), scale))
        assert np.array_equal(codes, wanted), f"scale {scale}"


def test_a_sixth_through_fp16_has_the_same_scale() -> None:
    values = (np.arange(0, 0x7F80, dtype=np.uint32) << 16).view(np.float32)

    def e4m3(number: np.ndarray) -> np.ndarray:
        number = np.minimum(number, 448.0)
        step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(number, 1e-300))), -6) - 3)
        return np.minimum(np.round(np.divide(number, step)) * step, 448.0)

    kept = (values * np.float32(0.16666667163372040)).astype(np.float16).astype(np.float64)
    assert np.array_equal(e4m3(kept), e4m3(np.divide(values.astype(np.float64), 6.0)))
