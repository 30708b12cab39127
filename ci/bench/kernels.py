"""``python -m kvsan.ci.bench.kernels``: speed of the reference kernels, as shares of the same run's copy bandwidth.

The reference case's heads (16 query heads, 2 KV heads of 256), a batch of 64 with 8,192 tokens each, pages of 32 tokens
in random order, two layers in one pool so that pages of a layer do not touch. *Copy* is the bytes per second of a plain
copy of a gigabyte, read and written bytes both counted. A share is the bytes that a kernel must move, over its time,
over the copy's bytes per second. Decode is also put beside torch's scaled-dot-product attention on a contiguous copy of
the same keys and values, in the faster of two equivalent forms.

Times are those of the GPU: a CUDA graph of several calls is replayed, so that no call waits for Python. The plain copy
is not part of a graph, which would hand it to a copy engine.

One JSON document on standard output; ``--sweep`` tries many tilings of decode.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from ...kernels.device import Device, open_device
from ...model.formats import ElementFormat
from ...model.spec import AttentionLayer, CacheSpec

REQUESTS: Final = 64
CONTEXT_TOKENS: Final = 8192
PAGE_TOKENS: Final = 32
QUERY_HEADS: Final = 16
KV_HEADS: Final = 2
HEAD_DIM: Final = 256
COPY_BYTES: Final = 1 << 30
REPEATS: Final = 20
GRAPH_CALLS: Final = 5
DECODE_TARGETS: Final = {ElementFormat.BF16: 0.8, ElementFormat.FP8: 0.65, ElementFormat.NVFP4: 0.35}
MOVE_TARGET: Final = 0.8


class Share(msgspec.Struct, frozen=True):
    """One measurement: the share of the copy bandwidth, the least it should be, and the time over torch's (or None)."""

    name: str
    share: float
    target: float
    over_torch: float | None = None
    detail: str = ""


class KernelBench(msgspec.Struct, frozen=True):
    """All measurements of one run, and the device they were made on."""

    device: str
    shares: tuple[Share, ...]


class _Cache(msgspec.Struct, frozen=True):
    """A filled layer of a paged cache; ``keys`` and ``values`` are its contents, (requests, tokens, heads, dim)."""

    memory: Any
    problem: Any
    keys: Any
    values: Any
    read_bytes: int


def bench_kernels(*, sweep: bool = False) -> KernelBench:
    """Measure on the current GPU; raises ``SpecError`` where there is none."""
    device = open_device("cuda")
    copy_rate = _copy_rate()
    shares: list[Share] = []
    for format, target in DECODE_TARGETS.items():
        cache = _filled(device, format)
        shares += _decode_shares(cache, format, target, copy_rate, sweep=sweep)
        if not sweep:
            shares += [_append_share(cache, format, copy_rate), *_move_shares(cache, format, copy_rate)]
    return KernelBench(device.name, tuple(shares))


def _seconds(call: Callable[[], Any]) -> float:
    """Return the median time of ``call`` on the GPU, replayed in graphs of several calls."""
    import torch

    for _ in range(2):  # a kernel is compiled before the graph records it
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return _median(graph.replay) / GRAPH_CALLS


def _median(run: Callable[[], Any]) -> float:
    """Return the median time of ``run`` between two of the GPU's events, in seconds."""
    import torch

    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return float(statistics.median(times))


def _copy_rate() -> float:
    """Return the bytes per second, read and written, of a plain copy."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    return 2 * COPY_BYTES / _median(lambda: target.copy_(source))


def _filled(device: Device, format: ElementFormat) -> _Cache:
    """Return a cache of ``format`` filled through the append kernel."""
    import torch

    from ...kernels.attention.problem import PagedAttention
    from ...kernels.paged.views import LayoutMemory, PagedPlane
    from ...kernels.quantize.rows import append
    from ...sim.layout import KEY, KEY_SCALE, VALUE, VALUE_SCALE
    from ...sim.registry import allocate

    pages = CONTEXT_TOKENS // PAGE_TOKENS  # floor: exact
    layer = AttentionLayer(kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    spec = CacheSpec(layers=(layer, layer), kv_format=format, tokens_per_block=PAGE_TOKENS, slots=REQUESTS * pages)
    memory = LayoutMemory(device, layout := allocate(spec, "trtllm-v2"))
    views = {buffer.role: memory.of_buffer(buffer) for buffer in layout.buffers if buffer.layer == 1}
    key, value = PagedPlane(views[KEY], views.get(KEY_SCALE)), PagedPlane(views[VALUE], views.get(VALUE_SCALE))
    generator = torch.Generator(device="cuda").manual_seed(0)
    table = torch.randperm(REQUESTS * pages, generator=generator, device="cuda").to(torch.int32).view(REQUESTS, pages)
    lengths = torch.full((REQUESTS,), CONTEXT_TOKENS, dtype=torch.int32, device="cuda")
    shape = (REQUESTS * CONTEXT_TOKENS, KV_HEADS, HEAD_DIM)
    tokens = [torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(2)]
    requests, positions = _all_tokens()
    for plane, given in zip((key, value), tokens, strict=True):
        append(plane, given, requests, positions, table)
    read_bytes = 0
    for view in views.values():
        read_bytes += view.slots * math.prod(view.shape) * view.format.container_bytes
    keys, values = (each.view(REQUESTS, CONTEXT_TOKENS, KV_HEADS, HEAD_DIM) for each in tokens)
    return _Cache(memory, PagedAttention(key, value, table, lengths), keys, values, read_bytes)


def _all_tokens() -> tuple[Any, Any]:
    """Return (requests, positions) of every token of the batch."""
    import torch

    number = torch.arange(REQUESTS * CONTEXT_TOKENS, dtype=torch.int32, device="cuda")
    requests = torch.div(number, CONTEXT_TOKENS, rounding_mode="floor").to(torch.int32)
    return requests, (number - requests * CONTEXT_TOKENS).to(torch.int32)


def _decode_shares(
    cache: _Cache, format: ElementFormat, target: float, copy_rate: float, *, sweep: bool
) -> Iterator[Share]:
    """Yield decode's share with its own tiling, or one for each tiling of a sweep."""
    import torch

    from ...kernels.attention.decode import Tiling, decode

    queries = torch.randn(REQUESTS, QUERY_HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
    out = torch.empty(REQUESTS, QUERY_HEADS, HEAD_DIM, dtype=torch.float32, device="cuda")
    name = f"decode {format.value}"
    if not sweep:
        seconds = _seconds(lambda: decode(cache.problem, queries, out))
        over = seconds / _torch_seconds(cache, queries)
        yield Share(name, cache.read_bytes / seconds / copy_rate, target, over)
        return
    for tokens in (32, 64, 128):
        for stages in (1,) if format == ElementFormat.NVFP4 else (2, 3, 5, 7):
            for warps in (4, 8):
                for split in (512, 1024, 2048, 4096):
                    tiling = Tiling(tokens, stages, warps)
                    detail = f"tokens {tokens}, stages {stages}, warps {warps}, split {split}"
                    options: dict[str, Any] = {"split_tokens": split, "tiling": tiling}
                    try:
                        seconds = _seconds(functools.partial(decode, cache.problem, queries, out, **options))
                    except RuntimeError as error:  # a tiling that does not fit the GPU
                        print(f"{name}: {detail}: {' '.join(str(error).split())[:120]}", file=sys.stderr)
                        break
                    yield Share(name, cache.read_bytes / seconds / copy_rate, target, None, detail)


def _torch_seconds(cache: _Cache, queries: Any) -> float:
    """Return the time of torch's attention on contiguous bf16 keys and values, the faster of two forms.

    Either query heads share KV heads, or those that share one stand as its query tokens.
    """
    import torch

    keys, values = (each.transpose(1, 2).contiguous() for each in (cache.keys, cache.values))
    grouped = queries.view(REQUESTS, KV_HEADS, -1, HEAD_DIM)
    attend = torch.nn.functional.scaled_dot_product_attention
    return min(
        _seconds(lambda: attend(grouped, keys, values)),
        _seconds(lambda: attend(queries[:, :, None], keys, values, enable_gqa=True)),
    )


def _append_share(cache: _Cache, format: ElementFormat, copy_rate: float) -> Share:
    """Return the share of appending the whole batch's keys from bf16."""
    from ...kernels.quantize.rows import append

    plane = cache.problem.key
    requests, positions = _all_tokens()
    source = cache.keys.view(-1, KV_HEADS, HEAD_DIM)
    seconds = _seconds(lambda: append(plane, source, requests, positions, cache.problem.table))
    moved = source.numel() * 2 + cache.read_bytes / 2
    return Share(f"append {format.value}", moved / seconds / copy_rate, MOVE_TARGET)


def _move_shares(cache: _Cache, format: ElementFormat, copy_rate: float) -> Iterator[Share]:
    """Yield the shares of gathering and of scattering all pages of K in their random order."""
    import torch

    from ...kernels.pages.copying import gather_pages, scatter_pages

    view = cache.problem.key.data
    slots = cache.problem.table.view(-1)
    pages = torch.empty((slots.numel(), *view.shape), dtype=view.storage.dtype, device="cuda")
    moved = 2 * pages.numel() * pages.element_size()
    for name, move in (("gather", gather_pages), ("scatter", scatter_pages)):
        seconds = _seconds(functools.partial(move, view, slots, pages))
        yield Share(f"{name} {format.value}", moved / seconds / copy_rate, MOVE_TARGET)


def main() -> int:
    """Measure and print; speed is never a failure, so the exit status is 0."""
    parser = argparse.ArgumentParser(prog="python -m kvsan.ci.bench.kernels", description="Measure the kernels.")
    parser.add_argument("--sweep", action="store_true", help="try many tilings of decode")
    found = bench_kernels(sweep=parser.parse_args().sweep)
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
