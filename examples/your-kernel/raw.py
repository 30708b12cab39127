"""A CUDA kernel in place of ours, through CuPy: ``raw.cu``, compiled when it is first launched.

It knows bf16, fp16 and fp32, with sliding windows and sinks. ``python -m kvsan.kernels.trials --device cuda --own
raw:decode --shapes 500`` tries it on a GPU; without one every shape is refused.
"""

import functools
from pathlib import Path

import numpy as np
import torch

from kvsan.model.errors import SpecError

FORMATS = {"fp32": 0, "fp16": 1, "bf16": 2}
THREADS = 128


def decode(problem, queries, out):
    """Launch ``attend`` over a ``kvsan.kernels.attention.problem.PagedAttention``, on torch's current stream."""
    if not out.is_cuda:
        raise SpecError("kernel", "found memory of the host, a CUDA kernel needs a GPU: --device cuda")
    import cupy

    threads, given, _kept = arguments(problem, queries, out)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        compiled()((-(-threads // THREADS),), (THREADS,), given)


@functools.cache
def compiled():
    """Return the kernel, compiled once by NVRTC."""
    import cupy

    return cupy.RawKernel(Path(__file__).with_name("raw.cu").read_text(), "attend")


def arguments(problem, queries, out):
    """Return (threads, the kernel's arguments, what must live until it is launched)."""
    key, value = problem.key.data, problem.value.data
    if key.format.value not in FORMATS:
        raise SpecError("kernel", f"found {key.format.value}, this kernel knows {', '.join(FORMATS)}")
    asked = queries.to(torch.float32).contiguous()  # queries are not paged, so they may be put in order
    _, query_heads, dim = queries.shape
    pointers = [asked, key.storage, value.storage, problem.table, problem.lengths, out]
    sizes = [
        FORMATS[key.format.value], out.numel(), query_heads, query_heads // problem.heads, dim, value.dim,
        problem.page_tokens, problem.table.stride(0), problem.window or 0, problem.sinks,
    ]  # fmt: skip
    strides = []
    for view in (key, value):
        strides += [view.start, view.slot_stride, *[view.stride(axis) for axis in ("head", "token", "dim")]]
    given = (
        *[np.uint64(tensor.data_ptr()) for tensor in pointers],
        np.float64(problem.score_scale * problem.key.unit),
        np.float64(problem.value.unit),
        *[np.int32(size) for size in sizes],
        *[np.int64(stride) for stride in strides],
    )
    return out.numel(), given, asked
