"""One rank of a transfer in a process of its own: ``python -m kvsan.kernels.transfers.child JOB PROCESS PARENT``.

``JOB`` is a file that the parent has written beside the processes' meeting place; the answer goes beside it. ``PARENT``
is that process's number, since it may be gone before this one has read anything. All ranks
work the same plan out from the pair, so nothing but the cache's bytes travels between them. Messages are of bounded
size and go in one order that all agree on, so that nobody waits for somebody who waits for him. A process ends when its
parent does, and when a message takes longer than the job allows.
"""

from __future__ import annotations

import datetime
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from ...model.errors import SpecError
from ...sim.transfer.names import transfer_named
from ...sim.transfer.pair import Pair, judge_pair
from ...sim.transfer.plan import ByteCopy, byte_copies
from ...sim.transfer.proof import Staging, stage
from .carrying import MESSAGE_BYTES, Flat, Prepared, inside, messages, packing, unpacking
from .contents import SourcePool, TargetPool, digits_of, source_pools, target_pools
from .one_device import Difference, differences

WATCH_SECONDS: Final = 0.5
"""How often a process looks whether its parent is still there."""


class Job(msgspec.Struct, frozen=True):
    """What all processes of a transfer are told: the first ranks are the source's, the others the destination's.

    ``method`` names the transfer, the allocators lay out the sides; ``seconds`` is how long a message may take.
    """

    pair: Pair
    method: str
    source_allocator: str
    destination_allocator: str
    device: str
    senders: int
    receivers: int
    seconds: float
    message_bytes: int = MESSAGE_BYTES


class Report(msgspec.Struct, frozen=True):
    """What one process says: what is different in its pools, the bytes it sent or was sent, and how long it took.

    ``seconds`` is the median over all digits, ``plain_seconds`` the time for messages of the same bytes with nothing
    gathered or scattered. ``error`` is why there is nothing else.
    """

    differences: tuple[Difference, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    error: str = ""


Message = tuple[int, int, list[ByteCopy]]
"""The sending process, the receiving one, and what one message is made of."""


def main(arguments: Sequence[str]) -> int:
    """Take part in one transfer; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    folder, number = Path(arguments[0]).parent, int(arguments[1])
    threading.Thread(target=_watch, args=(int(arguments[2]),), daemon=True).start()
    answer = folder / f"answer-{number}"
    try:
        job = msgspec.msgpack.decode(Path(arguments[0]).read_bytes(), type=Job)
        report = _Rank(job, folder, number).run()
    except Exception as error:
        report = Report(error=" ".join(f"{type(error).__name__}: {error}".split()))
    part = answer.with_suffix(".part")
    part.write_bytes(msgspec.msgpack.encode(report))
    part.replace(answer)
    return 1 if report.error else 0


def _watch(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(3)


class _Rank:
    """This process's rank: its pools in memory, and the messages of the whole transfer."""

    def __init__(self, job: Job, folder: Path, number: int) -> None:
        self.job, self.number = job, number
        method, _ = transfer_named(job.method)
        verdict = judge_pair(job.pair, job.source_allocator, job.destination_allocator, method)
        self.staging = stage(verdict.source, verdict.destination)
        self.device = self._open(folder)
        sends = number < job.senders
        ranks = self.staging.senders if sends else self.staging.receivers
        rank = ranks[number if sends else number - job.senders]
        self.side = "source" if sends else "destination"
        self.pools: list[Any] = (
            list(source_pools(self.staging, rank))
            if sends
            else list(target_pools(self.staging, rank, verdict.plan.copies))
        )
        self.flats = {
            (pool.rank, pool.pool): Flat(
                torch.empty(pool.size_bytes, dtype=torch.int8, device=self.device), 0, pool.size_bytes
            )
            for pool in self.pools
        }
        self.messages = list(_messages(self.staging, verdict.plan.copies, job))
        self.parcel = torch.empty(job.message_bytes, dtype=torch.int8, device=self.device)
        self.work = [self._prepared(message) for message in self.messages]

    def _open(self, folder: Path) -> torch.device:
        """Meet the other processes; raise ``SpecError`` where there are too few GPUs."""
        job = self.job
        world = job.senders + job.receivers
        if job.device == "cuda":
            count = torch.cuda.device_count()
            if count < world:
                problem = f"cuda with a process for each rank needs {world} GPUs, and there are {count}"
                raise SpecError("--device", f"{problem}: use --device cpu, or leave --processes out")
            torch.cuda.set_device(self.number)
        device = torch.device("cpu") if job.device == "cpu" else torch.device("cuda", self.number)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # all of them are on this host
        dist.init_process_group(
            "gloo" if job.device == "cpu" else "nccl",
            init_method=f"file://{folder / 'meeting'}",
            rank=self.number,
            world_size=world,
            timeout=datetime.timedelta(seconds=job.seconds),
            device_id=device if job.device == "cuda" else None,
        )
        return device

    def _prepared(self, message: Message) -> Prepared | None:
        """Return this process's part in a message: to gather it, to scatter it, or nothing."""
        sender, receiver, copies = message
        if self.number == sender:
            return packing(copies, self.flats, self.parcel)
        return unpacking(copies, self.parcel, self.flats) if self.number == receiver else None

    def run(self) -> Report:
        """Carry the transfer out for each digit, and compare this rank's pools."""
        try:
            found: dict[int, Difference] = {}
            times, plain, size = [], 0.0, 0
            digits = digits_of(self.staging)
            for digit in range(digits):
                for pool in self.pools:
                    octets = pool.filled(digit) if isinstance(pool, SourcePool) else pool.before(digit)
                    self.flats[pool.rank, pool.pool].octets.copy_(torch.from_numpy(octets.view("int8")))
                size, seconds = self._exchange(whole=True)
                times.append(seconds)
                for pool in self.pools:
                    for difference in self._compared(pool, digit):
                        found.setdefault(pool.pool, difference)
            plain = min(self._exchange(whole=False)[1] for _ in range(2))
            return Report(tuple(found.values()), size, statistics.median(times), plain)
        finally:
            dist.destroy_process_group()

    def _exchange(self, *, whole: bool) -> tuple[int, float]:
        """Send and receive all messages of this process; without ``whole`` their content is left as it is."""
        self._meet()
        start, size = time.perf_counter(), 0
        for (sender, receiver, _), work in zip(self.messages, self.work, strict=True):
            if work is None:
                continue
            count = work.size_bytes
            if self.number == sender:
                if whole:
                    work.run()
                dist.send(self.parcel[:count], receiver)
            else:
                dist.recv(self.parcel[:count], sender)
                if whole:
                    work.run()
            size += count
        self._meet()
        return size, time.perf_counter() - start

    def _meet(self) -> None:
        """Wait until all processes are here, and their devices done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def _compared(self, pool: SourcePool | TargetPool, digit: int) -> list[Difference]:
        held = self.flats[pool.rank, pool.pool].octets.cpu().numpy().view("uint8")
        needed = pool.filled(digit) if isinstance(pool, SourcePool) else pool.after(digit)
        return differences(self.side, pool, held, needed)


def _messages(staging: Staging, copies: Sequence[Any], job: Job) -> Iterator[Message]:
    """Yield all messages, in the order in which all processes look at them: that of the plan."""
    senders = {rank.rank: number for number, rank in enumerate(staging.senders)}
    receivers = {rank.rank: job.senders + number for number, rank in enumerate(staging.receivers)}
    sizes = [
        {(rank.rank, pool): held.size_bytes for rank in side for pool, held in enumerate(rank.layout.pools)}
        for side in (staging.senders, staging.receivers)
    ]
    between: dict[tuple[int, int], list[ByteCopy]] = {}
    for copy in byte_copies(copies, *staging.slots):
        one = Flat(None, 0, sizes[0][copy.source_rank, copy.source_pool])
        other = Flat(None, 0, sizes[1][copy.destination_rank, copy.destination_pool])
        if inside(copy, one, other):
            pair = senders[copy.source_rank], receivers[copy.destination_rank]
            between.setdefault(pair, []).append(copy)
    for (sender, receiver), held in sorted(between.items(), key=lambda entry: entry[0]):
        for message in messages(held, job.message_bytes):
            yield sender, receiver, message


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
