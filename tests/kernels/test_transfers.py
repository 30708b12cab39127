"""Transfers on real memory: every byte as predicted, for sound and faulty transfers, on one device and by processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from kvsan.ci.transfer_faults import TRANSFER_FAULTS, TransferFault
from kvsan.kernels.device import Device
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import INDEX_KEY, INDEX_POSITION, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import AttentionLayer, CacheSpec, Consumer, Draft, LatentLayer, RecurrentLayer
from kvsan.sim.transfer.faulty import method_named
from kvsan.sim.transfer.pair import Pair, PairVerdict, judge_pair
from kvsan.sim.transfer.plan import ByteCopy, byte_copies
from kvsan.sim.transfer.proof import stage

if TYPE_CHECKING:
    from kvsan.kernels.transfers.child import Job
    from kvsan.kernels.transfers.runs import Runs

torch = pytest.importorskip("torch")

from kvsan.kernels.transfers import carrying  # noqa: E402
from kvsan.kernels.transfers.carrying import (  # noqa: E402
    Flat,
    address_of,
    bytes_of,
    carry,
    inside,
    messages,
    packing,
    unpacking,
)
from kvsan.kernels.transfers.contents import CANARY, VOID, SourcePool, TargetPool, digits_of  # noqa: E402
from kvsan.kernels.transfers.one_device import replay_transfer  # noqa: E402
from kvsan.kernels.transfers.rows import _even_runs, rows_of_rank  # noqa: E402

LAYERS = (
    AttentionLayer(
        kv_heads=4, head_dim=16, side_planes=(SidePlane(role=INDEX_KEY, dim=16, format=ElementFormat.BF16),)
    ),
    RecurrentLayer(algorithm="gdn", heads=4, head_dim=2, groups=2, state_dim=4, conv_kernel=4),
)
PLAIN = (AttentionLayer(kv_heads=4, head_dim=16),)
"""Without a side plane, whose pages must have equal tokens on both sides."""
ALLOCATOR = "trtllm-v2-qsa-packed"
SPEC = CacheSpec(layers=LAYERS, tokens_per_block=4)


def verdict_of(source: str, destination: str, tokens: int = 4, **fields: object) -> PairVerdict:
    one = msgspec.structs.replace(SPEC, parallel=ParallelLayout.parse(source), **fields)
    other = msgspec.structs.replace(SPEC, parallel=ParallelLayout.parse(destination), tokens_per_block=tokens, **fields)
    return judge_pair(Pair(source=one, destination=other), ALLOCATOR)


@pytest.mark.parametrize(("source", "destination"), [("tp2", "tp1"), ("adp2", "tp4pp2")])
def test_a_sound_transfer_is_as_predicted_and_probed(host: Device, source: str, destination: str) -> None:
    verdict = verdict_of(source, destination)
    assert verdict.status == "clean", verdict.findings
    moved = replay_transfer(host, verdict)
    assert moved.findings == ()
    assert moved.bytes > 0
    assert moved.rows_probed > 10
    assert moved.seconds > 0 < moved.plain_seconds
    assert moved.ratio == moved.plain_seconds / moved.seconds


@pytest.mark.parametrize("fault", TRANSFER_FAULTS, ids=lambda fault: fault.name)
def test_what_a_faulty_transfer_does_to_memory_is_as_predicted(host: Device, fault: TransferFault) -> None:
    verdict = judge_pair(fault.minimum, method=method_named(fault.name))
    assert verdict.status == "findings"
    moved = replay_transfer(host, verdict)
    assert (moved.findings, moved.rows_probed) == ((), 0)


def test_memory_that_does_otherwise_is_found(host: Device, monkeypatch) -> None:
    """A copy that is not carried out, one that writes another byte, one that writes behind a pool."""
    verdict = verdict_of("tp1", "tp2")
    real = carrying.carry

    def lost(copy: ByteCopy, source: Flat, destination: Flat) -> None:
        if copy.destination_rank != 1 or copy.destination_pool != 0:
            real(copy, source, destination)

    def shifted(copy: ByteCopy, source: Flat, destination: Flat) -> None:
        real(msgspec.structs.replace(copy, destination_offset=copy.destination_offset + 1), source, destination)

    def behind(copy: ByteCopy, source: Flat, destination: Flat) -> None:
        real(copy, source, destination)
        destination.octets[destination.before + destination.size_bytes] = 1

    def at_the_source(copy: ByteCopy, source: Flat, destination: Flat) -> None:
        real(copy, source, destination)
        source.octets[source.before] += 1

    for wrong, words in (
        (lost, "on the destination's rank 1"),
        (shifted, "on the destination's rank 0"),
        (behind, "found 0x01, needs 0xa5"),
        (at_the_source, "on the source's rank 0"),
    ):
        monkeypatch.setattr(carrying, "carry", wrong)
        findings = replay_transfer(host, verdict).findings
        assert {finding.rule for finding in findings} == {"replay-mismatch"}
        assert any(words in finding.message for finding in findings), findings


def test_memory_is_bounded(host: Device) -> None:
    with pytest.raises(SpecError, match=r"--max-memory: the pools of both sides take \d+ B, needs at most 999 B"):
        replay_transfer(host, verdict_of("tp1", "tp2"), max_bytes=999)


def test_the_rows_of_a_rank_are_its_logical_bytes() -> None:
    """Against the tags: every byte of every row of the source has the row's address plus its place in the row."""
    verdict = verdict_of("tp2", "tp1")
    staging = stage(verdict.source, verdict.destination)
    for rank in staging.senders:
        from kvsan.kernels.transfers.contents import source_pools

        pools = source_pools(staging, rank)
        told = [np.zeros(pool.size_bytes, dtype=np.int64) for pool in pools]
        for place, count, pitch, size, number, step, pool, _ in rows_of_rank(staging, rank, 0):
            for cell in range(count):
                start = place + cell * pitch
                told[pool][start : start + size] = number + cell * step + np.arange(size)
        for pool, numbers in zip(pools, told, strict=True):
            tags = np.repeat(pool.tags.astype(np.int64), pool.granule)[: pool.size_bytes]
            inside_granule = np.tile(np.arange(pool.granule), len(pool.tags))[: pool.size_bytes]
            assert np.array_equal(numbers, np.where(tags > 0, tags + inside_granule, 0))
    assert list(_even_runs((0, 2, 4, 9, 10, 11, 30))) == [(0, 3), (3, 3), (6, 1)]


def test_contents_by_hand() -> None:
    tags = np.array([0, 0x1FE, 0], dtype=np.uint64)
    source = SourcePool(0, 0, 11, tags, 4)
    assert list(source.filled(0)) == [VOID] * 4 + [0xFE, 0xFF, 0x00, 0x01] + [VOID] * 3
    assert list(source.filled(1)) == [VOID] * 4 + [1, 1, 2, 2] + [VOID] * 3
    held = np.array([0x1FE, 0, 0], dtype=np.uint64)
    target = TargetPool(0, 0, 11, tags, held, np.array([True, False, True]), 4)
    assert list(target.before(0)) == [CANARY] * 4 + [0x01, 0x00, 0xFF, 0xFE] + [CANARY] * 3
    assert list(target.after(0)) == [0xFE, 0xFF, 0x00, 0x01] + [0x01, 0x00, 0xFF, 0xFE] + [VOID] * 3
    assert digits_of(stage(*[verdict_of("tp1", "tp1").source] * 2)) == 3


def copied(copy: ByteCopy, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return ``target`` after ``copy``, byte by byte."""
    result = target.copy()
    for index in np.ndindex(*copy.counts):
        one = copy.source_offset + sum(i * s for i, s in zip(index, copy.source_strides, strict=True))
        other = copy.destination_offset + sum(i * s for i, s in zip(index, copy.destination_strides, strict=True))
        result[other : other + copy.run_bytes] = source[one : one + copy.run_bytes]
    return result


COPIES = [
    ByteCopy(0, 0, 3, 0, 0, 5, 7, (), (), ()),
    ByteCopy(0, 0, 8, 0, 0, 16, 8, (3,), (16,), (24,)),
    ByteCopy(0, 0, 1, 0, 0, 2, 3, (2, 4), (40, 6), (31, 5)),
    ByteCopy(0, 0, 4, 0, 0, 0, 4, (5,), (4,), (12,)),
]


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("limit", [2, 9, 1000])
def test_copies_and_messages_against_byte_by_byte(copy: ByteCopy, limit: int) -> None:
    source = np.arange(1, 129, dtype=np.uint8)
    target = np.zeros(128, dtype=np.uint8)
    wanted = copied(copy, source, target)
    flats = [{(0, 0): Flat(torch.from_numpy(side.copy().view(np.int8)), 0, 128)} for side in (source, target)]
    for way in (carrying.carry_by_torch, carrying.carry_by_numpy):
        way(copy, flats[0][0, 0], flats[1][0, 0])
        assert np.array_equal(flats[1][0, 0].octets.numpy().view(np.uint8), wanted)
        flats[1][0, 0].octets.zero_()
    parcel = torch.zeros(limit + 3, dtype=torch.int8)
    total = 0
    for message in messages([copy, copy], limit):
        size = sum(map(bytes_of, message))
        assert size <= limit or copy.run_bytes > limit
        assert packing(message, flats[0], parcel).run() == unpacking(message, parcel, flats[1]).run() == size <= limit
        total += size
    assert total == 2 * bytes_of(copy)
    assert np.array_equal(flats[1][0, 0].octets.numpy().view(np.uint8), wanted)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 16])
def test_launches_of_runs_copy_the_same(host: Device, shift: int) -> None:
    """What a GPU launches for a whole plan, through the interpreter: long and short runs, words of every size."""
    from kvsan.kernels.transfers.runs import launches_of, runs_of

    held = torch.from_numpy(np.random.default_rng(1).integers(-128, 128, 40_000, dtype=np.int8))
    copies = (
        ByteCopy(0, 0, 16, 0, 0, 32 + shift, 48, (3, 5), (320, 48), (480, 96)),
        ByteCopy(0, 0, 2000 + shift, 0, 0, 2003, 7, (2,), (9,), (11,)),
        ByteCopy(0, 0, 3000, 0, 0, 3000 + 4 * shift, 4 * (70 + shift), (), (), ()),
        ByteCopy(0, 0, 4096, 0, 0, 4096, 16 * 2000, (), (), ()),
    )
    flats = [Flat(torch.zeros(40_000, dtype=torch.int8), 64, 39_900) for _ in range(2)]
    taken = Flat(held, 0, 40_000)
    runs = runs_of((copy, address_of(taken), address_of(flats[0])) for copy in copies)
    assert runs.size_bytes == sum(map(bytes_of, copies))
    launches = launches_of(runs, held)
    for launch in launches:
        launch.run()
    for copy in copies:
        carry(copy, taken, flats[1])
    assert torch.equal(flats[0].octets, flats[1].octets)
    assert {launch.rows for launch in launches} == {1, 16}


def test_runs_that_write_to_one_byte_are_not_launched(host: Device) -> None:
    from kvsan.kernels.transfers.runs import launches_of, runs_of

    octets = torch.zeros(100, dtype=torch.int8)
    twice = [
        (ByteCopy(0, 0, 0, 0, 0, start, 8, (), (), ()), octets.data_ptr(), octets.data_ptr()) for start in (40, 47)
    ]
    assert runs_of(twice[:1]).disjoint
    assert not runs_of(twice).disjoint
    with pytest.raises(ValueError, match="write to one byte"):
        launches_of(runs_of(twice), octets)


def test_nothing_is_carried_past_a_pool() -> None:
    flat = Flat(None, 0, 20)
    assert inside(ByteCopy(0, 0, 12, 0, 0, 0, 4, (2,), (4,), (16,)), flat, flat)
    for copy in (
        ByteCopy(0, 0, 13, 0, 0, 0, 4, (2,), (4,), (16,)),
        ByteCopy(0, 0, 12, 0, 0, 1, 4, (2,), (4,), (16,)),
        ByteCopy(0, 0, -1, 0, 0, 0, 4, (), (), ()),
    ):
        assert not inside(copy, flat, flat)


def test_torch_is_imported_only_for_a_replay() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kvsan.cli.peers_run, kvsan.cli.peers_replay, kvsan.cli.pair_case, kvsan.ci.transfer_campaign\n"
        "print(sorted({'torch', 'triton', 'cupy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


HEADS = AttentionLayer(kv_heads=4, head_dim=16)
SINGLE = AttentionLayer(kv_heads=1, head_dim=16)
WINDOW = AttentionLayer(kv_heads=4, head_dim=16, window=8)
POSITION = SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank")
SPARSE = AttentionLayer(
    kv_heads=1,
    head_dim=16,
    side_planes=(SidePlane(role=INDEX_KEY, dim=16, format=ElementFormat.BF16), POSITION),
)
MAMBA = RecurrentLayer(algorithm="mamba2", heads=4, head_dim=2, groups=4, state_dim=4, conv_kernel=4)
LATENT = LatentLayer(latent_dim=16, rope_dim=8)
NHD = Consumer(kv_layout="NHD")
FOLDED, SEPARATE = (Draft(mode=mode, layers=(HEADS,)) for mode in ("folded", "separate"))
MAPPED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "equal shards": ("tp2", "tp2", {"layers": LAYERS}, {}),
    "finer shards": ("tp1", "tp4", {"layers": LAYERS}, {}),
    "coarser shards": ("tp4", "tp2", {"layers": LAYERS}, {}),
    "replicas": ("tp4", "tp2", {"layers": (SINGLE, HEADS)}, {}),
    "more replicas": ("tp2", "tp4", {"layers": (SINGLE, HEADS)}, {}),
    "attention-DP to TP": ("adp2", "tp4", {"layers": LAYERS}, {}),
    "TP to attention-DP": ("tp4", "adp2", {"layers": LAYERS}, {}),
    "tokens outside heads": ("tp1", "tp2", {"layers": (HEADS, SINGLE), "consumer": NHD}, {}),
    "block scales": ("tp1", "tp2", {"layers": (HEADS,), "kv_format": ElementFormat.NVFP4}, {}),
    "one byte an element": ("tp4", "tp1", {"layers": (HEADS, SINGLE), "kv_format": ElementFormat.FP8}, {}),
    "a packed plane": ("tp1", "tp2", {"layers": (SPARSE, SPARSE)}, {}),
    "sections of Mamba-2": ("tp2", "tp4", {"layers": (MAMBA,), "state_format": ElementFormat.FP32}, {}),
    "sections brought together": ("tp4", "tp1", {"layers": (*LAYERS, MAMBA)}, {}),
    "even stages": ("tp2", "tp1pp2", {"layers": (HEADS, SINGLE, HEADS, SINGLE)}, {}),
    "uneven stages": ("tp2pp3", "tp1pp2", {"layers": (HEADS, LAYERS[1], HEADS, SINGLE)}, {}),
    "smaller blocks": ("tp2", "tp1", {"layers": (LATENT, LATENT)}, {"tokens_per_block": 1}),
    "larger blocks": ("tp2", "tp1", {"layers": (HEADS, LAYERS[1])}, {"tokens_per_block": 16}),
    "windows": ("tp1", "tp4", {"layers": (WINDOW, HEADS)}, {}),
    "a folded draft": ("tp1", "tp2", {"layers": (HEADS, SINGLE), "draft": FOLDED}, {}),
    "a draft that parts": ("tp2", "tp1", {"layers": (HEADS, SINGLE), "draft": FOLDED}, {"draft": SEPARATE}),
}
"""Every way in which bytes are mapped, small: layouts, what both sides have, and what the destination has instead."""


def mapped(name: str) -> PairVerdict:
    source, destination, both, own = MAPPED[name]
    one = msgspec.structs.replace(SPEC, parallel=ParallelLayout.parse(source), **both)
    other = msgspec.structs.replace(SPEC, parallel=ParallelLayout.parse(destination), **both | own)
    dp = 1 if other.parallel.attention_dp else 0
    sparse = any(getattr(layer, "side_planes", ()) for layer in one.layers)
    allocator = ALLOCATOR if sparse else "trtllm-v2"
    return judge_pair(Pair(source=one, destination=other, destination_dp=dp), allocator)


def test_every_way_of_mapping_is_among_those_that_are_carried_out() -> None:
    """The situations that campaigns count, all kinds of roles, and runs cut along one axis and along none."""
    from kvsan.ci.transfer_coverage import SITUATIONS, situations_of
    from kvsan.ci.transfer_judging import JudgedTransfer
    from kvsan.sim.transfer.registering import register

    met: set[str] = set()
    kinds: set[str] = set()
    for name in MAPPED:
        verdict = mapped(name)
        assert verdict.status == "clean", (name, verdict.findings, verdict.rejection)
        specs = [layouts[0].spec for layouts in (verdict.source, verdict.destination)]
        pair = Pair(source=specs[0], destination=specs[1], destination_dp=int(specs[1].parallel.attention_dp))
        met |= set(situations_of(pair, JudgedTransfer(verdict, (), ())))
        kinds |= {view.role_layout.kind for layout in verdict.source for view in register(layout).views}
    assert set(SITUATIONS) - met == set()
    assert kinds == {"HND", "NHD", "REPLICATED", "SECTIONED"}


@pytest.mark.parametrize("name", ["block scales", "smaller blocks"])
def test_mappings_on_the_host(host: Device, name: str) -> None:
    moved = replay_transfer(host, mapped(name))
    assert moved.findings == ()
    assert moved.rows_probed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAPPED)
def test_a_gpu_moves_as_predicted(gpu: Device, name: str) -> None:
    """Every byte of both sides, guard zones included; and the probe kernels find every row where it belongs."""
    moved = replay_transfer(gpu, mapped(name))
    assert moved.findings == ()
    assert moved.rows_probed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("fault", TRANSFER_FAULTS, ids=lambda fault: fault.name)
def test_a_faulty_transfer_on_a_gpu_is_as_predicted(gpu: Device, fault: TransferFault) -> None:
    moved = replay_transfer(gpu, judge_pair(fault.minimum, method=method_named(fault.name)))
    assert moved.findings == ()
    assert moved.rows_probed == 0


def carries_nothing_past_a_pool(device: Device) -> None:
    """A copy that reaches past either pool is a finding of the proof; memory beside the pools stays as it was."""
    verdict = verdict_of("tp1", "tp2")
    first = verdict.plan.copies[0]
    pools = verdict.source[0].pools[first.source_pool], verdict.destination[0].pools[first.destination_pool]
    past = (
        msgspec.structs.replace(first, destination_offset=pools[1].size_bytes - first.run_bytes + 1),
        msgspec.structs.replace(first, source_offset=pools[0].size_bytes - first.run_bytes + 1),
    )
    plan = msgspec.structs.replace(verdict.plan, copies=(*past, *verdict.plan.copies))
    moved = replay_transfer(device, msgspec.structs.replace(verdict, status="findings", plan=plan))
    assert moved.findings == ()
    slots = stage(verdict.source, verdict.destination).slots
    assert moved.bytes == sum(map(bytes_of, byte_copies(verdict.plan.copies, *slots)))


def test_what_reaches_past_a_pool_harms_no_memory(host: Device) -> None:
    carries_nothing_past_a_pool(host)


@pytest.mark.gpu
def test_what_reaches_past_a_pool_harms_no_memory_of_a_gpu(gpu: Device) -> None:
    carries_nothing_past_a_pool(gpu)


@pytest.mark.gpu
def test_memory_of_a_gpu_that_does_otherwise_is_found(gpu: Device, monkeypatch) -> None:
    """Launches that do nothing, and launches whose runs go 16 bytes too far."""
    verdict = verdict_of("tp1", "tp2")
    real = carrying.launches_of

    def lost(runs: Runs, anchor: Any) -> list[Any]:
        return [SimpleNamespace(run=lambda: None)]

    def shifted(runs: Runs, anchor: Any) -> list[Any]:
        return real(msgspec.structs.replace(runs, targets=runs.targets + 16), anchor)

    for wrong in (lost, shifted):
        monkeypatch.setattr(carrying, "launches_of", wrong)
        assert {finding.rule for finding in replay_transfer(gpu, verdict).findings} == {"replay-mismatch"}


@pytest.mark.gpu
def test_a_gpu_carries_nothing_illegal_out(gpu: Device) -> None:
    """A refused pair has no copies, too little memory is refused before any is taken, and so are too few GPUs."""
    other = msgspec.structs.replace(SPEC, kv_format=ElementFormat.FP8)
    refused = judge_pair(Pair(source=SPEC, destination=other), ALLOCATOR)
    assert (refused.status, refused.plan.copies) == ("refused", ())
    with pytest.raises(SpecError, match="--max-memory"):
        replay_transfer(gpu, verdict_of("tp1", "tp2"), max_bytes=999)
    from kvsan.ci.transfer_processes import move_between_processes

    count = torch.cuda.device_count() + 1
    job = msgspec.structs.replace(nccl_job("tp2", "tp4"), processes=count, seconds=300.0)
    with pytest.raises(SpecError, match=rf"--device: cuda with {count} processes needs a GPU for each"):
        move_between_processes(job)


def nccl_job(source: str, destination: str, processes: int = 0) -> Job:
    from kvsan.kernels.transfers.child import Job

    pair = Pair(
        source=msgspec.structs.replace(SPEC, parallel=ParallelLayout.parse(source)),
        destination=msgspec.structs.replace(SPEC, parallel=ParallelLayout.parse(destination)),
    )
    ranks = [spec.parallel.world_size for spec in (pair.source, pair.destination)]
    return Job(pair, "transfer", ALLOCATOR, ALLOCATOR, "cuda", *ranks, 120.0, 1000, processes)


def moves_through_nccl(job: Job) -> None:
    """All bytes as predicted, in many messages that cut runs, and every byte sent is one received."""
    from kvsan.ci.transfer_processes import move_between_processes

    reports = move_between_processes(job)
    assert [report.differences for report in reports] == [()] * job.world
    sent, received = (sum(getattr(each, name) for each in reports) for name in ("bytes_sent", "bytes_received"))
    assert sent == received > 2000


@pytest.mark.gpu
def test_one_gpu_moves_through_nccl(gpu: Device) -> None:
    """All ranks in one process, which sends to itself: every call of NCCL that two GPUs make."""
    moves_through_nccl(nccl_job("tp2", "tp4", processes=1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("source", "destination", "processes"), [("tp1", "tp1", 2), ("tp2", "tp4", 2), ("tp4", "tp1", 2)]
)
def test_two_gpus_move_through_nccl(gpu: Device, source: str, destination: str, processes: int) -> None:
    """A process a rank, and several ranks in each process."""
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, and there is {torch.cuda.device_count()}")
    moves_through_nccl(nccl_job(source, destination, processes))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("source", "destination", "processes"), [("tp1", "tp1", 2), ("tp2", "tp4", 2), ("tp4", "tp1", 0)]
)
def test_processes_that_share_gpus_move_through_nccl(
    gpu: Device, source: str, destination: str, processes: int
) -> None:
    """What two GPUs need of NCCL, a process for each rank, on one: NCCL takes each process for a host of its own."""
    moves_through_nccl(msgspec.structs.replace(nccl_job(source, destination, processes), share=True))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True], ids=["one process", "a process a rank"])
@pytest.mark.parametrize("name", ["fault:every-replica-sends", "fault:wire-typed-by-first-pool"])
def test_a_faulty_transfer_through_nccl_is_as_predicted(gpu: Device, name: str, share: bool) -> None:
    (fault,) = [fault for fault in TRANSFER_FAULTS if fault.name == name]
    pair = fault.minimum
    ranks = [spec.parallel.world_size for spec in (pair.source, pair.destination)]
    from kvsan.ci.transfer_processes import move_between_processes
    from kvsan.kernels.transfers.child import Job

    processes = 0 if share else 1
    job = Job(pair, name, "trtllm-v2", "trtllm-v2", "cuda", *ranks, 120.0, processes=processes, share=share)
    assert [report.differences for report in move_between_processes(job)] == [()] * job.world
