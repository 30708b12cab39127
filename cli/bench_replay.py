"""``kvsan bench replay``: the bandwidth of the passes over a large pool, and small layouts per second."""

from __future__ import annotations

import sys
from pathlib import Path

from ..model.errors import SpecError, require_choice, require_int, shown
from .bench_run import REFERENCE
from .deployment import read_size
from .output import print_report, terminal, write_json
from .status import CLEAN

ALLOCATOR = "trtllm-v2"
"""Lays out the small layouts; those that break a rule are left out."""


def bench_replay(config: str | None, device: str, memory: str, layouts: str, json: bool) -> int:
    """Measure and report; speed is never a failure, so the exit status is 0."""
    require_choice("--device", device, ("cpu", "cuda"))
    size = require_int("--memory", read_size("--memory", memory), 1, 1 << 50)
    if not (layouts.isascii() and layouts.isdigit() and 1 <= int(layouts[:7]) <= 1_000_000):
        raise SpecError("--layouts", f"found {shown(layouts)}, needs a whole number from 1 to 1000000")
    path = Path(config) if config is not None else REFERENCE
    if not path.exists():
        raise SpecError("--config", f"{path} is not there; give the reference case's config.json")
    from ..kernels.device import open_device
    from ..model.loading import load
    from ..sim.registry import default_allocator

    open_device(device)
    from ..ci.bench.replaying import bench_bandwidth, bench_throughput, sound_specs

    spec = load(path, tp=2, kv_dtype="bf16")
    _tell("specs")
    specs = sound_specs(int(layouts), ALLOCATOR)
    throughput = bench_throughput(specs, ALLOCATOR, _tell, device)
    bandwidth = bench_bandwidth(spec, default_allocator(spec), size, _tell, device)
    if json:
        write_json({"throughput": throughput, "bandwidth": bandwidth})
        return CLEAN
    console = terminal()
    baseline = f"{throughput.baseline_per_second:,.0f} per second over {throughput.baseline_layouts}"
    small = f"{throughput.layouts:,} layouts of {throughput.mean_bytes:,.0f} B on average"
    speed = f"{throughput.per_second:,.0f} per second, {throughput.speedup:.1f} times torch view by view ({baseline})"
    large = f"pool of {bandwidth.pool_bytes:,} B, {bandwidth.views} views"
    lines = [f"{small}: {speed}", f"{large}; copy ceiling {bandwidth.ceiling_gb_per_s:,.0f} GB/s"]
    for each in bandwidth.passes:
        rate = f"{each.gb_per_s:,.0f} GB/s, {each.of_ceiling:.3f} of the ceiling"
        lines.append(f"  {each.name}: {rate} ({each.bytes:,} B in {each.ms:.2f} ms)")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    print_report(console)
    return CLEAN


def bench_transfer(config: str | None, device: str, memory: str, json: bool) -> int:
    """Measure transfers between two sets of pools and report; the exit status is 0."""
    require_choice("--device", device, ("cpu", "cuda"))
    size = require_int("--memory", read_size("--memory", memory), 1, 1 << 50)
    path = Path(config) if config is not None else REFERENCE
    if not path.exists():
        raise SpecError("--config", f"{path} is not there; give the reference case's config.json")
    from ..kernels.device import open_device
    from ..model.loading import load
    from ..sim.registry import default_allocator

    spec = load(path, kv_dtype="fp8")
    open_device(device)
    from ..ci.bench.transfers import bench_transfers

    found = bench_transfers(spec, default_allocator(spec), size, device, _tell)
    if json:
        write_json(found)
        return CLEAN
    console = terminal()
    for rate in found.pairs:
        moved = f"{rate.copies:,} copies, {rate.blocks} blocks, {rate.bytes:,} B"
        speed = f"{rate.of_plain_copy:.2f} of a plain copy ({rate.ms:.2f} ms over {rate.plain_ms:.2f} ms)"
        console.print(f"{rate.source} to {rate.destination}: {speed}; {moved}", markup=False, soft_wrap=True)
    print_report(console)
    return CLEAN


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
