"""Number formats inside Triton kernels: how stored containers become numbers and back.

Triton's interpreter truncates where a GPU rounds, and overflows fp8 where a GPU saturates; so under the interpreter the
conversions are done on the bits, with the rounding of the hardware (to nearest, ties to even).

Formats by code: 0 fp32, 1 fp16, 2 bf16, 3 fp8 (e4m3), 4 NVFP4 (e2m1 with one e4m3 scale per 16 elements).
"""

# mypy: ignore-errors
# ruff: noqa: SIM114
# Triton takes one branch of a constant condition, and must see both as branches.
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def decode_fp8(byte):
    """Return e4m3 bytes as fp16, exactly; as fp32 under the interpreter."""
    if INTERPRETED:
        bits = byte.to(tl.int32)
        exponent = (bits >> 3) & 15
        mantissa = (bits & 7).to(tl.float32)
        scaled = tl.where(exponent == 0, mantissa, mantissa + 8.0)
        # 2^(max(exponent, 1) - 10), from its bits
        power = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
        value = tl.where((bits & 127) == 127, float("nan"), scaled * power)
        return tl.where((bits & 128) != 0, -value, value)
    else:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def encode_fp8(value):
    """Return fp32 values as e4m3 bytes, rounded to nearest even, saturated at 448; NaN stays NaN."""
    if INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(value), 448.0)
        plain = size.to(tl.int32, bitcast=True)
        normal = ((plain + 0x7FFFF + ((plain >> 20) & 1)) >> 20) - (120 << 3)
        # below 2^-6 the step is 2^-9: adding 1.5 * 2^23 rounds to whole steps
        small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(value != value, 127, code)
        return (code | ((bits >> 24) & 128)).to(tl.uint8)
    else:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def decode_fp4(code):
    """Return e2m1 codes (0 to 15) as fp32."""
    bits = code.to(tl.int32)
    exponent = (bits >> 1) & 3
    mantissa = (bits & 1).to(tl.float32)
    power = ((exponent + 126) << 23).to(tl.float32, bitcast=True)  # 2^(exponent - 1)
    value = tl.where(exponent == 0, mantissa * 0.5, (1.0 + 0.5 * mantissa) * power)
    return tl.where((bits & 8) != 0, -value, value)


@triton.jit
def encode_fp4(value, scale):
    """Return fp32 ``value`` over e4m3 ``scale`` (both fp32) as e2m1 codes: to nearest, ties to even, at most 6.

    Compared with midpoints times the scale, which fp32 holds exactly. A scale of zero gives zeros; zeros keep the sign.
    """
    size = tl.abs(value)
    code = (size > scale * 0.25).to(tl.int32) + (size >= scale * 0.75).to(tl.int32)
    code += (size > scale * 1.25).to(tl.int32) + (size >= scale * 1.75).to(tl.int32)
    code += (size > scale * 2.5).to(tl.int32) + (size >= scale * 3.5).to(tl.int32)
    code += (size > scale * 5.0).to(tl.int32)
    code = tl.where(scale == 0.0, 0, code)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def to_bf16(value):
    """Return fp32 values as bf16, rounded to nearest even."""
    if INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        rounded = tl.where(value != value, 0x7FC00000, rounded)
        return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return value.to(tl.bfloat16)


@triton.jit
def to_stored(value, FORMAT: tl.constexpr):
    """Return fp32 values as containers of a format without block scales."""
    if FORMAT == 0:
        return value
    elif FORMAT == 1:
        return value.to(tl.float16)
    elif FORMAT == 2:
        return to_bf16(value)
    else:
        return encode_fp8(value)


@triton.jit
def from_stored(stored, FORMAT: tl.constexpr):
    """Return containers of a format without block scales as fp32."""
    if FORMAT == 3:
        return decode_fp8(stored).to(tl.float32)
    else:
        return stored.to(tl.float32)


@triton.jit
def for_dot(value, FORMAT: tl.constexpr):
    """Return a matrix operand in the type that products of this format are computed in.

    fp32 stays, bf16 stays bf16, fp16, fp8 and NVFP4 (exact in fp16) become fp16. Under the interpreter all is fp32.
    """
    if INTERPRETED:
        return value.to(tl.float32)
    elif FORMAT == 0:
        return value.to(tl.float32)
    elif FORMAT == 2:
        return value.to(tl.bfloat16)
    else:
        return value.to(tl.float16)


@triton.jit
def load_rows(data, rows, dim_stride, scales, scale_rows, scale_dim_stride, columns, mask, FORMAT: tl.constexpr):
    """Return the elements ``columns`` of rows that start at ``rows`` (containers) as fp32, 0 where ``mask`` is false.

    ``scale_rows`` are where the rows' block scales start; both are int64. Any strides will do.
    """
    if FORMAT == 4:
        at = rows[:, None] + (columns // 2)[None, :].to(tl.int64) * dim_stride  # floor: byte of the element
        byte = tl.load(data + at, mask=mask, other=0).to(tl.int32)
        value = decode_fp4((byte >> ((columns & 1) * 4)[None, :]) & 15)
        scale_at = scale_rows[:, None] + (columns // 16)[None, :].to(tl.int64) * scale_dim_stride  # floor: its block
        return value * decode_fp8(tl.load(scales + scale_at, mask=mask, other=0)).to(tl.float32)
    else:
        at = rows[:, None] + columns[None, :].to(tl.int64) * dim_stride
        return from_stored(tl.load(data + at, mask=mask, other=0), FORMAT)
