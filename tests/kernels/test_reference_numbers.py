"""The float64 references against torch's own operators."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from kvsan.kernels.reference import attention, numbers, sparse, state  # noqa: E402
from kvsan.kernels.reference.bounds import Bound, compare  # noqa: E402
from kvsan.model.formats import ElementFormat  # noqa: E402


def drawn(*sizes: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64) * scale


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (ElementFormat.FP32, torch.float32),
        (ElementFormat.FP16, torch.float16),
        (ElementFormat.BF16, torch.bfloat16),
        (ElementFormat.FP8, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rounding_is_torchs(format: ElementFormat, dtype: torch.dtype, scale: float) -> None:
    # fp32 values, so that torch rounds once; clamped, because torch's cast to fp8 does not saturate
    values = drawn(4096, scale=scale).to(torch.float32).clamp(-448, 448)
    assert torch.equal(numbers.as_stored(values, format), values.to(dtype).to(torch.float64))


def test_fp4_knows_its_numbers() -> None:
    values = torch.tensor([0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100.0, -5.0], dtype=torch.float64)
    wanted = [0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -4.0]
    assert numbers.round_fp4(values).tolist() == wanted


def test_nvfp4_keeps_a_block_whose_numbers_it_has() -> None:
    block = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2, dtype=torch.float64)
    assert torch.equal(numbers.as_stored(block * 0.875, ElementFormat.NVFP4), block * 0.875)
    error = numbers.as_stored(drawn(64, 64), ElementFormat.NVFP4) - drawn(64, 64)
    assert 0.05 < float(error.norm() / drawn(64, 64).norm()) < 0.15


@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_attention_is_torchs(window: int | None) -> None:
    queries, keys, values = drawn(5, 6, 24), drawn(17, 2, 24), drawn(17, 2, 10)
    seen = attention.visible(torch.arange(12, 17), 17, window, 2)
    want = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), seen, scale=0.3, enable_gqa=True
    )
    got = attention.attention(queries, keys, values, seen, 0.3)
    assert torch.allclose(got, want.transpose(0, 1), atol=1e-12)


def test_what_a_window_shows() -> None:
    seen = attention.visible(torch.tensor([0, 5]), 6, 2, 1)
    assert seen.tolist() == [[True, False, False, False, False, False], [True, False, False, False, True, True]]
    assert attention.attention(drawn(1, 1, 4), drawn(6, 1, 4), drawn(6, 1, 4), seen[:1] & False, 1.0).abs().max() == 0


def test_leaving_blocks_out_equals_not_having_them() -> None:
    queries, keys, values = drawn(1, 2, 8), drawn(12, 1, 8), drawn(12, 1, 8)
    seen = torch.ones(1, 12, dtype=torch.bool)
    skipped = torch.tensor([[[False, True, False]]] * 2)
    got = attention.skip_softmax(queries, keys, values, seen, 1.0, skipped, 4)
    rest = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    want = attention.attention(queries, keys[rest], values[rest], seen[:, :8], 1.0)
    assert torch.allclose(got, want)
    assert not torch.allclose(got, attention.attention(queries, keys, values, seen, 1.0))


def test_convolution_is_torchs() -> None:
    kept, inputs, weights, bias = drawn(2, 6, 3), drawn(2, 6), drawn(6, 4), drawn(6)
    window = torch.cat([kept, inputs[..., None]], -1)
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(window, weights[:, None], bias, groups=6))[..., 0]
    got, after = state.conv_step(kept, inputs, weights, bias)
    assert torch.allclose(got, want)
    assert torch.equal(after, window[..., 1:])


def test_mamba2_steps_are_the_closed_sum() -> None:
    """After n tokens the state is the sum over tokens of what each put in, decayed by all later steps."""
    heads, dims, states = 4, 3, 5
    x, b, c = (drawn(6, 1, heads, dims), drawn(6, 1, 2, states), drawn(6, 1, 2, states))
    dt, a, d = drawn(6, 1, heads), -drawn(heads).abs(), drawn(heads)
    held = torch.zeros(1, heads, dims, states, dtype=torch.float64)
    for token in range(6):
        out, held = state.mamba2_step(held, x[token], b[token], c[token], dt[token], a, d)
    step = torch.log1p(torch.exp(dt))
    want = torch.zeros_like(held)
    for head in range(heads):
        for token in range(6):
            later = step[token + 1 :, 0, head].sum() * a[head]
            put = step[token, 0, head] * torch.outer(x[token, 0, head], b[token, 0, head // 2])
            want[0, head] += torch.exp(later) * put
    assert torch.allclose(held, want)
    assert torch.allclose(out[0, 3], want[0, 3] @ c[5, 0, 1] + d[3] * x[5, 0, 3])


def test_the_delta_rule_learns_a_pair() -> None:
    """With full strength and no decay, the state answers a key with exactly the value that was put in last."""
    k, v = drawn(1, 1, 8), drawn(1, 1, 5)
    held = drawn(1, 1, 5, 8)
    far = torch.full((1, 1), 100.0, dtype=torch.float64)
    none = torch.full((1,), -100.0, dtype=torch.float64)
    out, held = state.delta_step(held, k, k, v, -far, far, none, none)
    unit = k[0, 0] / k[0, 0].norm()
    assert torch.allclose(held[0, 0] @ unit, v[0, 0], atol=1e-5)
    assert torch.allclose(out[0, 0] * math.sqrt(8), v[0, 0], atol=1e-5)


def test_index_scores_depend_on_distance_alone() -> None:
    queries, keys = drawn(2, 12), drawn(7, 12)
    place, places = torch.tensor([5, 2, 9]), torch.randint(0, 50, (7, 3), generator=torch.Generator().manual_seed(1))
    one = sparse.token_scores(queries, place, keys, places, 10_000.0)
    other = sparse.token_scores(queries, place + 11, keys, places + 11, 10_000.0)
    assert torch.allclose(one, other)
    assert not torch.allclose(one, sparse.token_scores(queries, place, keys, places + 1, 10_000.0))


def test_the_last_block_is_kept_and_ties_go_to_the_earlier() -> None:
    assert sparse.kept_blocks(torch.tensor([1.0, 3.0, 3.0, 3.0, -9.0]), 3) == [1, 2, 4]
    assert sparse.kept_blocks(torch.tensor([1.0]), 3) == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_never_pass(value: float) -> None:
    wanted = drawn(3, 4)
    spoilt = wanted.clone()
    spoilt[1, 2] = value
    wide = Bound(math.inf, 1e300)
    assert compare(wanted, wanted, wide).within
    found = compare(spoilt, wanted, wide)
    assert not found.within
    assert found.place == (1, 2)
    with pytest.raises(ValueError, match="not finite"):
        compare(wanted, spoilt, wide)


def test_zeros_are_compared_exactly() -> None:
    assert compare(torch.zeros(3), torch.zeros(3), Bound(0.1, 0.1)).within
    assert not compare(torch.tensor([0.0, 1e-9, 0.0]), torch.zeros(3), Bound(0.1, 0.1)).within
