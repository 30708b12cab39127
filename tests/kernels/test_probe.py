"""The probe kernels against NumPy's strides, class by class and with tiles smaller than the views."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsan.kernels.device import Device
from kvsan.kernels.memory_cpu import HostDevice
from kvsan.kernels.probe import launch
from kvsan.kernels.probe.elements import ElementTable, element_rows, verify_elements
from kvsan.kernels.probe.rows import (
    AXES,
    ITEM,
    ROW_CLASSES,
    RowTable,
    placed,
    rows_of,
    tile_ends,
)
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.sim.arena import ByteView
from kvsan.sim.arena.fold import fold
from kvsan.sim.arena.memory import digit_of
from kvsan.sim.arena.views import through, write
from kvsan.sim.page import strided_page

SIZE = 1 << 14

# One view per class of rows: 16, 4 and 1 byte words, long and short items, with and without axes.
VIEWS = (
    ByteView(0, 16, 2048, 3, (), 1024),
    ByteView(0, 8192, 2048, 3, (), 1100),
    ByteView(0, 1041, 2048, 3, (), 1031),
    ByteView(0, 0, 1072, 2, ((3, 4096),), 1072),
    ByteView(0, 4, 1036, 2, ((3, 4096),), 1032),
    ByteView(0, 1, 1037, 2, ((3, 4096),), 1031),
    ByteView(0, 4, 64, 50, (), 20),
    ByteView(0, 3, 61, 70, (), 5),
    ByteView(0, 8, 512, 7, ((2, 256), (5, 16)), 8),
    ByteView(0, 5, 300, 7, ((2, 150), (5, 7)), 3),
    ByteView(0, 8000, -400, 9, ((3, 100),), 60),
)


@pytest.fixture(scope="module")
def small_tiles(host: Device) -> HostDevice:
    """Return a host whose tiles are much smaller than the views, so that every way of cutting them is used."""
    assert host.kind == "cpu"
    device = HostDevice()
    device.block_words, device.short_block_words, device.fold_block_words = 128, 64, 128
    return device


def numbers_of(view: ByteView, first: int) -> np.ndarray:
    return np.arange(view.count, dtype=np.int64) + first


def upload(
    device: Device, anchor: launch.Anchor, base: int, views: list[tuple[ByteView, int]], bytewise: bool = False
) -> list[launch.Uploaded]:
    rows, places = [], []
    for place, (view, first) in enumerate(views):
        found = rows_of(view, range(view.count), 0, first)
        rows += found
        places += [place] * len(found)
    table = placed(rows, np.array([base - anchor.address]), np.array([SIZE]))
    return launch.upload(device, RowTable.build(table, np.array(places, dtype=np.int64), bytewise=bytewise))


def test_the_views_above_cover_every_class(small_tiles: HostDevice) -> None:
    anchor = launch.Anchor(small_tiles)
    base = small_tiles.allocate(SIZE).address
    uploaded = upload(small_tiles, anchor, base, [(view, 1) for view in VIEWS])
    assert {part.kind for part in uploaded} == set(ROW_CLASSES)
    assert all(part.tiles > 2 for part in uploaded)


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_stamp_writes_what_numpy_writes_and_verify_finds_every_flipped_byte(
    small_tiles: HostDevice, view: ByteView
) -> None:
    anchor, memory = launch.Anchor(small_tiles), small_tiles.allocate(SIZE)
    first = 250
    rows = upload(small_tiles, anchor, memory.address, [(view, first)])
    for digit in (0, 1):
        expected = np.zeros(SIZE, dtype=np.uint8)
        write(expected, view, range(view.count), digit_of(numbers_of(view, first), digit))
        memory.array[:] = 0
        launch.stamp(anchor, rows, digit)
        assert (memory.array == expected).all()
        tally = launch.new_tally(small_tiles, 1)
        launch.verify(anchor, rows, digit, tally)
        assert tally.read()[0].tolist() == [0]
        # the first and last byte of the first and last cell, and one in between
        window = through(memory.array, view, range(view.count))
        places = {(0,) * window.ndim, tuple(size - 1 for size in window.shape), tuple(s // 2 for s in window.shape)}
        starts = []
        for place in places:
            window[place] ^= 0x80
            starts.append(int(np.dot(place, window.strides)) + view.offset_bytes)
        launch.verify(anchor, rows, digit, tally)
        counts, lowest = tally.read()
        assert counts.tolist() == [len(places)]
        assert lowest[0] + anchor.address - memory.address == min(starts)


def test_views_with_more_axes_than_a_row_has_room_for_become_several_rows(small_tiles: HostDevice) -> None:
    axes = tuple((2, 3 * 2**power) for power in range(AXES + 2))
    view = ByteView(0, 7, 1024, 3, axes, 2)
    rows = rows_of(view, range(3), 0, 1)
    assert len(rows) == 4
    anchor, memory = launch.Anchor(small_tiles), small_tiles.allocate(SIZE)
    memory.array[:] = 0
    launch.stamp(anchor, upload(small_tiles, anchor, memory.address, [(view, 1)]), 0)
    expected = np.zeros(SIZE, dtype=np.uint8)
    write(expected, view, range(3), digit_of(numbers_of(view, 1), 0))
    assert (memory.array == expected).all()


def test_many_rows_share_a_launch_and_keep_their_results_apart(small_tiles: HostDevice) -> None:
    anchor, memory = launch.Anchor(small_tiles), small_tiles.allocate(SIZE)
    views = [(ByteView(0, 16 * index, 4096, 2, (), 16), 1 + 2 * index) for index in range(40)]
    rows = upload(small_tiles, anchor, memory.address, views)
    memory.array[:] = 0
    launch.stamp(anchor, rows, 0)
    memory.array[16 * 7 + 3] = 0
    memory.array[4096 + 16 * 31] = 0
    memory.array[4096 + 16 * 31 + 15] = 0
    tally = launch.new_tally(small_tiles, len(views))
    launch.verify(anchor, rows, 0, tally)
    counts, lowest = tally.read()
    assert {int(place): int(counts[place]) for place in np.flatnonzero(counts)} == {7: 1, 31: 2}
    assert lowest[31] + anchor.address - memory.address == 4096 + 16 * 31


def test_tiles_are_counted_in_words_of_the_class() -> None:
    table = placed(rows_of(ByteView(0, 0, 4096, 3, (), 4096), range(3), 0, 1), np.array([0]), np.array([SIZE]))
    ((kind, rows, _),) = RowTable.build(table).classes
    assert (kind.word_bytes, kind.long_items) == (16, True)
    # 4,096 bytes are 1,024 words of 4 bytes: 16 tiles of 64 for each of three items
    assert tile_ends(kind, rows, 64).tolist() == [48]
    assert rows[:, ITEM].tolist() == [4096]


@given(held=st.binary(min_size=1, max_size=2100))
@settings(max_examples=12)
def test_fold_is_that_of_the_arena(small_tiles: HostDevice, held: bytes) -> None:
    anchor, memory = launch.Anchor(small_tiles), small_tiles.allocate(len(held) + 16)
    memory.array[:] = 0xFF
    memory.array[: len(held)] = np.frombuffer(held, dtype=np.uint8)
    table = placed(
        rows_of(ByteView(0, 0, 0, 1, (), len(held)), range(1), 0, 0),
        np.array([memory.address - anchor.address]),
        np.array([len(held)]),
    )
    folds = small_tiles.upload(np.zeros(1, dtype=np.int64))
    launch.fold(anchor, launch.Folding.upload(small_tiles, table), folds)
    assert int(folds[0]) % 2**64 == fold(np.frombuffer(held, dtype=np.uint8))


def test_offsets_of_32_bits_wrap_out_of_the_pool(small_tiles: HostDevice) -> None:
    """Past 2 GiB a signed offset is negative; the bytes are counted as wrong and never read."""
    size = (1 << 31) + 4096
    memory = small_tiles.allocate(size)  # only the pages that are touched take memory
    anchor = launch.Anchor(small_tiles)
    view = ByteView(0, 64, (1 << 31) - 64, 2, (), 32)
    for bytewise, wrong in ((False, 0), (True, 32)):
        found = rows_of(view, range(2), 0, 1)
        table = placed(found, np.array([memory.address - anchor.address]), np.array([size]))
        rows = launch.upload(small_tiles, RowTable.build(table, np.zeros(1, dtype=np.int64), bytewise=bytewise))
        tally = launch.new_tally(small_tiles, 1)
        launch.stamp(anchor, rows, 0)
        (launch.verify_narrow if bytewise else launch.verify)(anchor, rows, 0, tally)
        assert tally.read()[0].tolist() == [wrong]


SHAPES = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([-6, -2, 2, 4, 6, 8, 0])), min_size=0, max_size=AXES)


@given(axes=SHAPES, pitch=st.sampled_from([-64, -3, 0, 64, 200]), cells=st.integers(1, 3), first=st.integers(1, 300))
@settings(max_examples=60)
def test_the_second_pair_of_eyes_sees_exactly_the_bytes_of_a_page(
    host: Device, axes: list[tuple[int, int]], pitch: int, cells: int, first: int
) -> None:
    """Against plain enumeration: every byte that the page does not hold may be anything."""
    page = strided_page(
        ElementFormat.BF16, tuple("abcdef"[: len(axes)]), tuple(size for size, _ in axes), tuple(s for _, s in axes)
    )
    memory = host.allocate(4096)
    array = host.borrow(memory.address, 4096)
    array[:] = 0xEE
    offset = 2048
    expected: dict[int, set[int]] = {}
    for cell in range(cells):
        for index in np.ndindex(*page.shape):
            start = offset + cell * pitch + sum(x * s for x, s in zip(index, page.stride_bytes, strict=True))
            for byte in (start, start + 1):
                expected.setdefault(byte, set()).add((first + cell) & 255)
    for byte, digits in expected.items():
        array[byte] = min(digits)
    rows = [element_rows(offset, pitch, range(cells), page, first, 0, 0)]
    table = ElementTable.upload(host, rows, np.array([memory.address]))
    tally = launch.new_tally(host, 1)
    verify_elements(host, table, 0, tally.counts, tally.lowest)
    counts, lowest = tally.read()
    wrong = [byte for byte, digits in expected.items() if len(digits) > 1]
    assert bool(counts[0]) == bool(wrong)
    if wrong:
        assert lowest[0] - memory.address == min(wrong)
    else:
        victim = max(expected)
        array[victim] ^= 1
        verify_elements(host, table, 0, tally.counts, tally.lowest)
        assert tally.read()[1][0] - memory.address == victim


def test_pages_of_too_many_axes_are_refused_in_one_line() -> None:
    page = strided_page(ElementFormat.UINT8, tuple("abcdefg"), (1,) * 7, (1,) * 7)
    with pytest.raises(SpecError, match="found 7 axes, needs at most 6"):
        element_rows(0, 1, range(1), page, 1, 0, 0)
