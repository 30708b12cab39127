"""The reference kernels through Triton's interpreter: a fixed small set of shapes for each, and what they refuse."""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:  # importing it here would settle too early that kernels are compiled
    pytest.skip("triton is not installed", allow_module_level=True)

from kvsan.kernels.device import Device, open_device  # noqa: E402
from kvsan.kernels.trials.shape import SMALL, Shape  # noqa: E402
from kvsan.model.errors import SpecError  # noqa: E402
from kvsan.model.formats import ElementFormat  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, on rows that see nothing

PER_KERNEL = 3
KERNELS = (
    "append", "fetch", "quantize", "copy", "decode", "prefill", "latent", "skip-softmax", "sparse", "conv", "mamba2",
    "delta",
)  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu")


@pytest.mark.parametrize("seed", range(PER_KERNEL))
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_agree_with_float64(device: Device, kernel: str, seed: int) -> None:
    from kvsan.kernels.trials.kernels import trial_named

    trial = trial_named(kernel)
    shape = trial.draw(kernel, seed, SMALL)
    outcome = trial.run(device, shape)
    assert outcome.passed, f"{outcome.text} of {shape}"


def test_every_kernel_is_in_the_list(device: Device) -> None:
    from kvsan.kernels.trials.kernels import TRIALS

    assert tuple(trial.name for trial in TRIALS) == KERNELS


def test_skip_softmax_skips_and_a_factor_of_zero_does_not(device: Device) -> None:
    """A threshold that skips nothing is no test: here some blocks go, and the answer differs from dense."""
    from kvsan.kernels.attention.tiles import prefill, skip_softmax
    from kvsan.kernels.trials.attention import prepare

    shape = Shape(heads=2, head_dim=32, value_dim=32, page_tokens=7, lengths=(90,))
    ready = prepare(device, shape, 1)
    outs = [torch.full((1, 1, 2, 32), float("nan")) for _ in range(3)]
    prefill(ready.problem, ready.queries, outs[0])
    assert skip_softmax(ready.problem, ready.queries, outs[1], 0.0).count == 0
    assert skip_softmax(ready.problem, ready.queries, outs[2], 30.0).count > 0
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2], atol=1e-3)


def test_prefill_and_decode_agree(device: Device) -> None:
    from kvsan.kernels.attention.decode import decode
    from kvsan.kernels.attention.tiles import prefill
    from kvsan.kernels.trials.attention import prepare

    shape = Shape(format=ElementFormat.FP8, heads=2, group=3, head_dim=40, value_dim=24, lengths=(70, 9), page_tokens=8)
    ready = prepare(device, shape, 1)
    one, other = torch.empty(2, 6, 24), torch.empty(2, 1, 6, 24)
    decode(ready.problem, ready.queries[:, 0], one, split_tokens=32)
    prefill(ready.problem, ready.queries, other)
    assert torch.allclose(one, other[:, 0], atol=1e-5)


def broken(change: dict[str, Any]) -> Any:
    """Return a decode kernel that is handed one wrong number of the key's view."""

    def kernel(problem: Any, queries: Any, out: Any) -> None:
        from kvsan.kernels.attention.decode import decode

        data = problem.key.data
        wrong = {name: value(getattr(data, name)) for name, value in change.items()}
        key = msgspec.structs.replace(problem.key, data=msgspec.structs.replace(data, **wrong))
        decode(msgspec.structs.replace(problem, key=key), queries, out)

    return kernel


@pytest.mark.parametrize(
    "change",
    [
        {"start": lambda start: start + 1},
        {"slot_stride": lambda stride: stride - 8},
        {"strides": lambda strides: (strides[1], strides[0], strides[2])},
        {"strides": lambda strides: (strides[0], strides[1] + 1, strides[2])},
    ],
)
def test_one_wrong_number_is_seen(device: Device, change: dict[str, Any]) -> None:
    from kvsan.kernels.trials.attention import trial_decode

    shape = Shape(heads=2, group=2, head_dim=16, value_dim=16, page_tokens=3, lengths=(20,), slot_gap=4)
    assert trial_decode(device, shape).passed
    assert not trial_decode(device, shape, broken(change)).passed


def test_an_output_left_alone_does_not_pass(device: Device) -> None:
    from kvsan.kernels.trials.attention import trial_decode

    shape = Shape(lengths=(3,))
    outcome = trial_decode(device, shape, lambda problem, queries, out: None)
    assert not outcome.passed
    assert "nan" in outcome.text


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({"head_dim": 257}, "at most 256"),
        ({"sinks": 2}, "needs a window"),
        ({"window": 0}, "at least 1"),
    ],
)
def test_refusals_say_why(device: Device, change: dict[str, Any], needs: str) -> None:
    from kvsan.kernels.trials.attention import trial_decode

    shape = msgspec.structs.replace(Shape(lengths=(3,)), **change)
    with pytest.raises(SpecError, match=needs):
        trial_decode(device, shape)


def test_formats_and_views_that_are_refused(device: Device) -> None:
    from kvsan.kernels.attention.tiles import latent
    from kvsan.kernels.paged.views import LayoutMemory, PagedPlane
    from kvsan.model.spec import AttentionLayer, CacheSpec
    from kvsan.sim.registry import allocate

    layer = AttentionLayer(kv_heads=2, head_dim=32)
    spec = CacheSpec(layers=(layer,), kv_format=ElementFormat.INT8)
    memory = LayoutMemory(device, layout := allocate(spec, "trtllm-v2"))
    with pytest.raises(SpecError, match="found format int8"):
        memory.of_buffer(layout.buffers[0])
    memory = LayoutMemory(device, layout := allocate(msgspec.structs.replace(spec, kv_format=ElementFormat.NVFP4)))
    key = memory.of_buffer(layout.buffers[0])
    with pytest.raises(SpecError, match="found no block scales"):
        PagedPlane(key)
    far = msgspec.structs.replace(layout.accesses[0], offset_bytes=1 << 30)
    with pytest.raises(SpecError, match="inside its pool"):
        memory.of_access(far)
    odd = msgspec.structs.replace(layout.accesses[0], slot_step=2)
    with pytest.raises(SpecError, match="counts all slots"):
        memory.of_access(odd)
    rows = PagedPlane(key, memory.of_buffer(layout.buffers[2]))
    with pytest.raises(SpecError, match="one row per token"):
        latent(rows, None, None, None, None, latent_dim=16, scale=1.0)


def test_shrinking_finds_the_smallest_shape() -> None:
    from kvsan.kernels.trials.shape import draw_shape
    from kvsan.kernels.trials.shrinking import shrink_shape

    shape = msgspec.structs.replace(draw_shape("decode", 3), lengths=(5, 90, 700), head_dim=200)
    found = shrink_shape(shape, lambda tried: sum(tried.lengths) >= 17 and tried.head_dim >= 5)
    assert found == Shape(lengths=(17,), head_dim=5, value_dim=1)
