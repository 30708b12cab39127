"""Some ranks of a transfer in a process: ``python -m kvsan.kernels.transfers.child JOB PROCESS PARENT``.

``JOB`` is a file that the parent has written beside the processes' meeting place; the answer goes beside it. ``PARENT``
is that process's number, since it may be gone before this one has read anything. A process has one rank, or where there
are fewer of them several, each ``processes`` after the one before. All work the same plan out from the pair, so nothing
but the cache's bytes travels between them. Messages are of bounded size and go in one order that all agree on, so that
nobody waits for somebody who waits for him. A process ends when its parent does, and when a message takes longer than
the job allows; then what is pending on a GPU is left as it is, since nobody is there to finish it.
"""

from __future__ import annotations

import datetime
import os
import shutil
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
from .contents import Octets, SourcePool, TargetPool, digits_of, source_pools, target_pools
from .one_device import Difference, differences

WATCH_SECONDS: Final = 0.5
"""How often a process looks whether its parent is still there."""


class Job(msgspec.Struct, frozen=True):
    """What all processes of a transfer are told: the first ranks are the source's, the others the destination's.

    ``method`` names the transfer, the allocators lay out the sides; ``seconds`` is how long a message may take.
    ``processes`` have the ranks among them, 0 stands for one process a rank. Where they ``share`` GPUs, NCCL takes each
    for a host of its own, as it refuses two ranks of one host on one GPU: messages go through sockets then.
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
    processes: int = 0
    share: bool = False

    @property
    def world(self) -> int:
        """How many processes there are."""
        return self.processes or self.senders + self.receivers


class Report(msgspec.Struct, frozen=True):
    """What one process says: what is different in its pools, the bytes it sent and was sent, and how long it took.

    ``seconds`` is the median over all digits, ``plain_seconds`` the time for messages of the same bytes with nothing
    gathered or scattered. ``error`` is why there is nothing else.
    """

    differences: tuple[Difference, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    error: str = ""


class Message(msgspec.Struct, frozen=True):
    """Some copies between two ranks, which the processes ``sender`` and ``receiver`` have."""

    sender: int
    receiver: int
    copies: list[ByteCopy]


def main(arguments: Sequence[str]) -> int:
    """Take part in one transfer; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    folder, number = Path(arguments[0]).parent, int(arguments[1])
    threading.Thread(target=_watch, args=(int(arguments[2]), folder), daemon=True).start()
    try:
        job = msgspec.msgpack.decode(Path(arguments[0]).read_bytes(), type=Job)
        report = _Process(job, folder, number).run()
    except Exception as error:
        report = Report(error=" ".join(f"{type(error).__name__}: {error}".split()))
    answer = folder / f"answer-{number}"
    part = answer.with_suffix(".part")
    part.write_bytes(msgspec.msgpack.encode(report))
    part.replace(answer)
    if not report.error:
        dist.destroy_process_group()  # after an error it would wait for messages that never come
    return 1 if report.error else 0


def _watch(parent: int, folder: Path) -> None:
    """End this process when its parent is gone, and take away what that can no longer."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(3)


class _Process:
    """The ranks that this process has, their pools in memory, and the messages of the whole transfer."""

    def __init__(self, job: Job, folder: Path, number: int) -> None:
        self.job, self.number = job, number
        method, _ = transfer_named(job.method)
        verdict = judge_pair(job.pair, job.source_allocator, job.destination_allocator, method)
        self.staging = stage(verdict.source, verdict.destination)
        self.device = self._open(folder)
        self.sources: list[SourcePool] = []
        self.targets: list[TargetPool] = []
        for place, rank in enumerate((*self.staging.senders, *self.staging.receivers)):
            if place % job.world != number:
                continue
            if place < job.senders:
                self.sources += source_pools(self.staging, rank)
            else:
                self.targets += target_pools(self.staging, rank, verdict.plan.copies)
        self.source = {(pool.rank, pool.pool): self._allocated(pool.size_bytes) for pool in self.sources}
        self.target = {(pool.rank, pool.pool): self._allocated(pool.size_bytes) for pool in self.targets}
        self.outgoing, self.incoming = (self._allocated(job.message_bytes).octets for _ in range(2))
        self.work = [
            (message, *self._prepared(message))
            for message in _messages(self.staging, verdict.plan.copies, job)
            if number in (message.sender, message.receiver)
        ]

    def _allocated(self, size_bytes: int) -> Flat:
        return Flat(torch.empty(size_bytes, dtype=torch.int8, device=self.device), 0, size_bytes)

    def _open(self, folder: Path) -> torch.device:
        """Meet the other processes; raise ``SpecError`` where there are too few GPUs."""
        job = self.job
        device = torch.device("cpu")
        if job.device == "cuda":
            count = torch.cuda.device_count()
            if count < job.world and not (job.share and count):
                problem = f"cuda with {job.world} processes needs a GPU for each, and there are {count}"
                raise SpecError("--device", f"{problem}: use --device cpu, or leave --processes out")
            if not dist.is_nccl_available():
                raise SpecError("--device", f"cuda needs NCCL, which torch {torch.__version__} was built without")
            device = torch.device("cuda", self.number % count)
            if job.share:
                os.environ["NCCL_HOSTID"] = f"kvsan-{self.number}"
            torch.cuda.set_device(device)  # before the meeting: else all of them open a context on the first GPU
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # all of them are on this host
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # else a late message leaves files behind
        dist.init_process_group(
            "gloo" if job.device == "cpu" else "nccl",
            init_method=f"file://{folder / 'meeting'}",
            rank=self.number,
            world_size=job.world,
            timeout=datetime.timedelta(seconds=job.seconds),
            device_id=device if job.device == "cuda" else None,
        )
        return device

    def _prepared(self, message: Message) -> tuple[Prepared | None, Prepared | None]:
        """Return this process's parts in a message: to gather it, and to scatter it."""
        gather = scatter = None
        if self.number == message.sender:
            gather = packing(message.copies, self.source, self.outgoing)
        if self.number == message.receiver:
            scatter = unpacking(message.copies, self.incoming, self.target)
        return gather, scatter

    def run(self) -> Report:
        """Carry the transfer out for each digit, and compare the pools of this process's ranks."""
        found: dict[tuple[str, int, int], Difference] = {}
        times = []
        for digit in range(digits_of(self.staging)):
            for pool in self.sources:
                self._fill(self.source[pool.rank, pool.pool], pool.filled(digit))
            for target in self.targets:
                self._fill(self.target[target.rank, target.pool], target.before(digit))
            times.append(self._exchange(whole=True))
            for difference in self._compared(digit):
                found.setdefault((difference.side, difference.rank, difference.pool), difference)
        plain = min(self._exchange(whole=False) for _ in range(2))
        sent, received = (sum(part.size_bytes for part in side if part) for side in zip(*self._parts(), strict=True))
        return Report(tuple(found.values()), sent, received, statistics.median(times), plain)

    def _parts(self) -> list[tuple[Prepared | None, Prepared | None]]:
        return [(gather, scatter) for _, gather, scatter in self.work] or [(None, None)]

    @staticmethod
    def _fill(flat: Flat, octets: Octets) -> None:
        flat.octets.copy_(torch.from_numpy(octets.view("int8")))

    def _exchange(self, *, whole: bool) -> float:
        """Send and receive all messages of this process, and return the seconds.

        Without ``whole`` nothing is gathered or scattered.
        """
        self._meet()
        start = time.perf_counter()
        for message, gather, scatter in self.work:
            if whole and gather is not None:
                gather.run()
            self._send(message, gather, scatter)
            if whole and scatter is not None:
                scatter.run()
        self._meet()
        return time.perf_counter() - start

    def _send(self, message: Message, gather: Prepared | None, scatter: Prepared | None) -> None:
        """Send one message or receive it, or both: between two ranks of this process.

        Sends and receives of NCCL go in groups, on the communicator of all processes, which exists since they met: one
        to oneself would wait for ever outside of a group. Gloo has none to oneself. On a GPU the host does not wait,
        the stream does.
        """
        if gather is not None and scatter is not None and self.device.type == "cpu":
            self.incoming[: scatter.size_bytes].copy_(self.outgoing[: gather.size_bytes])
            return
        operations = []
        if gather is not None:
            operations.append(dist.P2POp(dist.isend, self.outgoing[: gather.size_bytes], message.receiver))
        if scatter is not None:
            operations.append(dist.P2POp(dist.irecv, self.incoming[: scatter.size_bytes], message.sender))
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _meet(self) -> None:
        """Wait until all processes are here, and their devices done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    def _compared(self, digit: int) -> list[Difference]:
        """Return which pools of this process's ranks are not as predicted."""
        found: list[Difference] = []
        for pool in self.sources:
            held = self.source[pool.rank, pool.pool].octets.cpu().numpy().view("uint8")
            found += differences("source", pool, held, pool.filled(digit))
        for target in self.targets:
            held = self.target[target.rank, target.pool].octets.cpu().numpy().view("uint8")
            found += differences("destination", target, held, target.after(digit))
        return found


def _messages(staging: Staging, copies: Sequence[Any], job: Job) -> Iterator[Message]:
    """Yield all messages, in the order in which all processes look at them: by sending rank, then by receiving one."""
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
            yield Message(sender % job.world, receiver % job.world, message)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # the end of the interpreter would wait for threads of a group that failed
