"""What ``kvsan bench`` does once its options are known."""

from __future__ import annotations

import sys
from pathlib import Path

from ..model.errors import SpecError, require_choice, shown
from .output import print_report, terminal, write_json
from .status import CLEAN

REFERENCE = Path(__file__).parent.parent / "examples" / "qwen3.8-flash-next" / "config.json"
"""The reference case, where kvsan runs from a checkout."""


def run_bench(what: str, config: str | None, seeds: str, fault: str | None, json: bool) -> int:
    """Run one bench and report it; speed is never a failure, so the exit status is 0."""
    require_choice("BENCH", what, ("check", "fuzz", "traces", "engines", "replay", "transfer"))
    if what == "check":
        return _bench_check(Path(config) if config is not None else REFERENCE, json)
    if what == "traces":
        return _bench_traces(json)
    if what == "engines":
        return _bench_engines(json)
    if not (seeds.isascii() and seeds.isdigit() and 1 <= int(seeds[:6]) <= 10_000):
        raise SpecError("--seeds", f"found {shown(seeds)}, needs a whole number from 1 to 10000")
    return _bench_fuzz(int(seeds), fault, json)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _bench_check(config: Path, json: bool) -> int:
    from ..ci.bench.checking import bench_check
    from ..model.loading import load

    if not config.exists():
        raise SpecError("--config", f"{config} is not there; give the reference case's config.json")
    found = bench_check(config, load(config, tp=2, kv_dtype="fp8"), _tell)
    if json:
        write_json(found)
        return CLEAN
    console = terminal()
    draw = f"{found.check_ms:.3f} ms over {found.draw_ms:.3f} ms"
    layer = f"{found.layer_us_at_48:.1f} us to {found.layer_us_at_4800:.1f} us"
    start = f"{found.start_ms:.0f} ms over {found.imports_ms:.0f} ms"
    for name, ratio, limit, detail in (
        ("check over draw", found.check_over_draw, found.check_over_draw_limit, draw),
        ("growth of the cost per layer, 48 to 4,800 layers", found.growth, found.growth_limit, layer),
        ("start of `kvsan check --json` over imports", found.start_over_imports, found.start_over_imports_limit, start),
    ):
        console.print(f"{name}: {ratio:.2f} (at most {limit:g}; {detail})", markup=False)
    print_report(console)
    return CLEAN


def _bench_fuzz(seeds: int, fault: str | None, json: bool) -> int:
    from ..ci.bench.fuzzing import bench_fuzz
    from ..ci.faults import fault_named
    from ..sim.transfer.names import is_faulty_transfer

    if fault is not None and not is_faulty_transfer(fault):
        try:
            fault_named(fault)
        except SpecError as error:
            raise SpecError("--fault", error.problem) from None
    found = bench_fuzz(seeds, fault, _tell)
    if json:
        write_json(found)
        return CLEAN
    from .report_bench import report_fuzz_bench

    console = terminal()
    report_fuzz_bench(console, found)
    print_report(console)
    return CLEAN


def _bench_engines(json: bool) -> int:
    from ..ci.bench.engines import bench_engines

    found = bench_engines(progress=_tell)
    if json:
        write_json(found)
        return CLEAN
    console = terminal()
    console.print(
        f"{found.engine}: {found.checked_per_second:.0f} specs/s planned, viewed and checked over "
        f"{found.bare_per_second:.0f} planned and viewed alone: ratio {found.ratio:.2f} (at least "
        f"{found.ratio_limit:g}); one after another {found.in_turn_per_second:.0f}, ratio {found.in_turn_ratio:.2f}",
        markup=False,
    )
    print_report(console)
    return CLEAN


def _bench_traces(json: bool) -> int:
    from ..ci.bench.traces import bench_traces

    found = bench_traces(progress=_tell)
    if json:
        write_json(found)
        return CLEAN
    console = terminal()
    for rate in found.rates:
        console.print(
            f"{rate.allocator}: {rate.run_us:.0f} us to run an operation, {rate.draw_us:.0f} us to draw it: ratio "
            f"{rate.ratio:.2f} (at most {found.ratio_limit:g})",
            markup=False,
        )
    print_report(console)
    return CLEAN
