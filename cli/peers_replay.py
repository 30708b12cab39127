"""``kvsan peers ... --replay``: a transfer carried out on real memory, here or with a process for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..model.errors import SpecError, require_choice, require_int
from ..sim.finding import Finding
from ..sim.transfer.method import Method
from .deployment import read_size, read_whole

if TYPE_CHECKING:
    from .peers_run import JudgedPair

OPTIONS: Final = ("replay", "device", "processes", "max_memory", "timeout")
"""The options of a replay, by name."""


class ReplayOptions(msgspec.Struct, frozen=True):
    """Where a transfer is replayed: in memory of at most ``max_bytes``, or by processes that wait ``seconds``."""

    device: str
    processes: bool
    max_bytes: int
    seconds: int


class ReplayedPair(msgspec.Struct, frozen=True):
    """What memory says of a transfer: where it disagrees with the simulator, what was moved, and how fast.

    ``ratio`` is the speed of the transfer over that of a plain copy (of plain messages, between processes) of the same
    bytes in the same run. ``rows_probed`` counts rows that the probe kernels verified, 0 where they did not.
    """

    device: str
    processes: int
    findings: tuple[Finding, ...]
    bytes: int
    copies: int
    seconds: float
    plain_seconds: float
    ratio: float
    rows_probed: int
    memory_bytes: int


def read_replay(words: Mapping[str, Any]) -> ReplayOptions | None:
    """Return what is asked for, None without --replay; raise ``SpecError`` for options that need it."""
    if not words["replay"]:
        extra = next((name for name in OPTIONS if words[name] not in (None, False)), None)
        if extra is not None:
            raise SpecError(f"--{extra.replace('_', '-')}", "found without --replay, needs it")
        return None
    device = words["device"] or "cpu"
    require_choice("--device", device, ("cpu", "cuda"))
    seconds = 120 if words["timeout"] is None else read_whole("--timeout", words["timeout"])
    if not 1 <= seconds <= 86_400:
        raise SpecError("--timeout", f"found {seconds}, needs a whole number from 1 to 86400")
    max_bytes = read_size("--max-memory", words["max_memory"] or "256MiB")
    require_int("--max-memory", max_bytes, 1, 1 << 50)
    return ReplayOptions(device, bool(words["processes"]), max_bytes, seconds)


def replay_pair(judged: JudgedPair, method: Method, options: ReplayOptions) -> ReplayedPair | None:
    """Carry the transfer out; None where there is nothing to carry out, because the pair was refused.

    Raises ``SpecError`` for a device that is not there, and for pools larger than the memory allowed.
    """
    if judged.verdict.status not in ("clean", "findings"):
        return None
    if options.processes:
        return _with_processes(judged, method, options)
    from ..kernels.device import open_device

    try:
        device = open_device(options.device)  # says what is missing, before anything that needs it is imported
        from ..kernels.transfers.one_device import replay_transfer, require_memory

        require_memory(judged.verdict, options.max_bytes)
        moved = replay_transfer(device, judged.verdict, max_bytes=options.max_bytes)
    except MemoryError as error:
        raise SpecError("--max-memory", f"the device has not enough memory: {error}") from None
    except SpecError as error:
        raise SpecError("--device" if error.field == "device" else error.field, error.problem) from None
    return ReplayedPair(
        device.name or options.device,
        0,
        moved.findings,
        moved.bytes,
        moved.copies,
        moved.seconds,
        moved.plain_seconds,
        round(moved.ratio, 4),
        moved.rows_probed,
        moved.memory_bytes,
    )


def _with_processes(judged: JudgedPair, method: Method, options: ReplayOptions) -> ReplayedPair:
    import importlib.util

    from ..kernels.device import EXTRAS

    if importlib.util.find_spec("torch") is None:
        raise SpecError("--processes", f"needs the package torch, which is not installed: {EXTRAS['torch']}")
    from ..ci.transfer_processes import ProcessesFailed, move_between_processes, processes_for
    from ..kernels.transfers.child import Job
    from ..kernels.transfers.one_device import require_memory
    from .peers_run import pair_of

    names = judged.source.allocator.name, judged.destination.allocator.name
    verdict = judged.verdict
    memory_bytes = require_memory(verdict, options.max_bytes)
    pair = pair_of(judged.source, judged.destination)
    ranks = len(verdict.source), len(verdict.destination)
    job = Job(
        pair,
        method.name,
        *names,
        options.device,
        *ranks,
        float(options.seconds),
        processes=processes_for(options.device, sum(ranks)),
    )
    findings: tuple[Finding, ...] = ()
    size, seconds, plain = 0, 0.0, 0.0
    try:
        reports = move_between_processes(job)
    except ProcessesFailed as error:
        remedy = "give more time with --timeout, or report this pair"
        findings = (Finding(rule="replay-mismatch", message=f"the transfer did not end: {error}", remedy=remedy),)
    else:
        findings = tuple([difference.finding for report in reports for difference in report.differences])
        size = sum(report.bytes_sent for report in reports)
        seconds = max(report.seconds for report in reports)
        plain = max(report.plain_seconds for report in reports)
    ratio = round(plain / seconds, 4) if seconds else 0.0
    copies = len(verdict.plan.copies)
    return ReplayedPair(options.device, job.world, findings, size, copies, seconds, plain, ratio, 0, memory_bytes)
