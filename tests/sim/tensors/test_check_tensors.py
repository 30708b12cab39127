"""``check_tensors`` against brute force, planted faults, sound neighbours and hostile input, on NumPy and torch."""

from __future__ import annotations

import itertools
import math
import random
import time
from typing import Any

import numpy as np
import pytest

import kvsan
from kvsan.sim.overlap import SlotView
from kvsan.sim.tensors.candidates import meeting_pairs, runs_of

torch = pytest.importorskip("torch")

as_strided = np.lib.stride_tricks.as_strided


def rules_of(tensors: object, **options: Any) -> list[str]:
    return [finding.rule for finding in kvsan.check_tensors(tensors, **options)]


def random_view(draw: random.Random, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view inside ``memory`` (bytes) with up to three axes of any strides, negative and 0 among them."""
    dtype = np.dtype(draw.choice(["u1", "u2", "u4"]))
    shape = tuple(draw.choice([1, 1, 2, 3, 4, 5]) for _ in range(draw.randint(0, 3)))
    strides = tuple(draw.choice([0, 1, 1, 2, 3, 4, 6, 8, 12, -1, -2, -8]) * dtype.itemsize for _ in shape)
    low = sum(min(0, (count - 1) * stride) for count, stride in zip(shape, strides, strict=True))
    high = sum(max(0, (count - 1) * stride) for count, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    first = draw.randint(0, len(memory) - (high - low)) - low
    return as_strided(memory[first : first + dtype.itemsize].view(dtype).reshape(()), shape, strides)


def elements_meet(view: np.ndarray[Any, Any]) -> bool:
    """Say by enumeration whether two elements of ``view`` share a byte."""
    taken = []
    for index in np.ndindex(view.shape):
        first = sum(place * stride for place, stride in zip(index, view.strides, strict=True))
        taken += range(first, first + view.itemsize)
    return len(set(taken)) < len(taken)


def test_random_views_agree_with_shares_memory_and_enumeration() -> None:
    draw = random.Random(7)
    memory = np.zeros(480, dtype=np.uint8)
    shared = apart = twice = 0
    for _ in range(250):
        views = {f"t{number}": random_view(draw, memory) for number in range(6)}
        found = kvsan.check_tensors(views, limit=1000)
        pairs = {tuple(where.tensor for where in each.where) for each in found if each.rule == "alias"}
        for one, other in itertools.combinations(views, 2):
            meets = np.shares_memory(views[one], views[other], max_work=-1)
            assert ((one, other) in pairs) == meets, (views[one].shape, views[one].strides)
            shared, apart = shared + meets, apart + (not meets)
        for name, view in views.items():
            assert ((name,) in pairs) == elements_meet(view)
            twice += (name,) in pairs
    assert min(shared, apart, twice) > 200


def test_a_witness_is_an_element_of_both_at_that_byte() -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    left, right = as_strided(memory[3:], (10, 4), (64, 5)), as_strided(memory[695:], (7,), (-33,))
    (found,) = kvsan.check_tensors({"left": left, "right": right})
    byte = next(where.first_byte for where in found.where)
    everybody = [
        {view.__array_interface__["data"][0] + sum(map(math.prod, zip(index, view.strides, strict=True)))
         for index in np.ndindex(view.shape)}
        for view in (left, right)
    ]  # fmt: skip
    assert byte == min(everybody[0] & everybody[1])
    start = memory.__array_interface__["data"][0]
    assert f"share byte {byte - start} of the storage of left" in found.message
    assert "shape (10, 4), strides (64, 5) B" in found.message


def kv_cache(device: str, layers: int, order: str) -> dict[str, Any]:
    """Return K and V views of layers that interleave in one allocation, in one of three physical orders."""
    shape = {"L": layers, "B": 6, "H": 3, "N": 4, "C": 32}
    store = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16, device=device)
    store = store.permute([order.index(axis) for axis in "LBHNC"])
    views = {}
    for layer in range(layers):
        views[f"layers.{layer}.key"] = store[layer, ..., :16]
        views[f"layers.{layer}.value"] = store[layer, ..., 16:]
    return views


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("order", ["LBHNC", "BLNHC", "BHLNC", "LHBNC"])
def test_interleaved_layers_are_sound_and_one_slipped_layer_is_not(device: str, order: str) -> None:
    views = kv_cache(device, 5, order)
    assert kvsan.check_tensors(views) == []
    slipped = views["layers.2.value"]
    shifted = slipped.as_strided(slipped.shape, slipped.stride(), slipped.storage_offset() - 1)
    found = kvsan.check_tensors({**views, "layers.2.value": shifted})
    assert {where.tensor for finding in found for where in finding.where} >= {"layers.2.key", "layers.2.value"}
    with pytest.raises(AssertionError, match=r"layers\.2\.key"):
        kvsan.assert_no_alias({**views, "layers.2.value": shifted})
    kvsan.assert_no_alias(views)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_that_is_too_short_overlaps_itself(device: str) -> None:
    store = torch.zeros(10_000, dtype=torch.float16, device=device)
    assert rules_of({"k": store.as_strided((9, 4, 32), (128, 32, 1))}) == []
    assert rules_of({"k": store.as_strided((9, 4, 32), (96, 32, 1))}) == ["alias"]
    assert rules_of({"k": store[:1].expand(7)}) == ["alias"]
    contract = kvsan.TensorContract(self_overlap=("k",))
    assert rules_of({"k": store.as_strided((9, 4, 32), (96, 32, 1))}, contract=contract) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_that_was_freed_or_shortened_is_out_of_bounds(device: str) -> None:
    view = torch.zeros(64, device=device)[8:]
    assert rules_of({"k": view}) == []
    view.untyped_storage().resize_(100)
    (found,) = kvsan.check_tensors({"k": view})
    assert found.rule == "bounds"
    assert "reaches bytes 32 to 256 of a storage of 100 B" in found.message
    view.untyped_storage().resize_(0)
    assert "storage of 0 B" in kvsan.check_tensors({"k": view})[0].message


def test_a_numpy_view_beyond_its_owner_is_out_of_bounds() -> None:
    owner = np.zeros((4, 4), dtype=np.int16)
    assert rules_of({"k": owner[1:].T[::-1]}) == []
    (found,) = kvsan.check_tensors({"k": as_strided(owner[1:], (4, 4), (8, 2))})
    assert "reaches bytes 8 to 40 of a storage of 32 B" in found.message
    assert "storage of 32 B" in kvsan.check_tensors({"k": as_strided(owner[0, ::-1], (5,), (-2,))})[0].message


def test_torch_and_numpy_views_of_the_same_bytes_alias() -> None:
    tensor = torch.zeros(16)
    assert rules_of({"k": tensor[4:8], "v": tensor.numpy()[7:9]}) == ["alias"]
    assert rules_of({"k": tensor[4:8], "v": tensor.numpy()[8:9]}) == []
    assert "a storage of 64 B" in kvsan.check_tensors({"v": as_strided(tensor.numpy(), (17,), (4,))})[0].message


def test_meta_tensors_share_bytes_only_within_a_storage() -> None:
    one, other = torch.zeros(8, device="meta"), torch.zeros(8, device="meta")
    assert rules_of({"a": one, "b": other}) == []
    assert rules_of({"a": one, "b": one.view(torch.int32)[7:]}) == ["alias"]


def test_exclusive_tensors_are_held_apart_from_all_and_the_others_may_meet() -> None:
    store = torch.zeros(100)
    views = {"raw": store, "k": store[:50], "v": store[50:], "free": torch.zeros(4)}
    assert rules_of(views) == ["alias", "alias"]
    assert rules_of(views, exclusive=["free"]) == []
    assert rules_of(views, exclusive=[]) == []
    assert rules_of(views, exclusive=["v"]) == ["alias"]
    assert rules_of(views, contract=kvsan.TensorContract(shared=[("raw", "k"), ("raw", "v")])) == []
    assert rules_of({"states": [store[:8], store[7:9]], "raw": store}, exclusive={"raw": 0}.keys()) == ["alias"] * 2
    assert rules_of({"states": [store[:8], store[7:9]], "raw": store[50:]}, exclusive=["states"]) == ["alias"]


def test_rows_are_aligned_where_that_is_declared() -> None:
    rows = kvsan.TensorContract(alignment_bytes=16)
    store = torch.zeros(4096, dtype=torch.float16)
    base = -(store.data_ptr() // 2) % 8
    assert rules_of({"k": store.as_strided((9, 24), (32, 1), base)}, contract=rows) == []
    assert rules_of({"k": store.as_strided((9, 24), (32, 1), base + 4)}) == []
    (found,) = kvsan.check_tensors({"k": store.as_strided((9, 24), (32, 1), base + 4)}, contract=rows)
    assert found.rule == "alignment"
    assert "is not a multiple of 16 B, what the contract declares" in found.message
    (found,) = kvsan.check_tensors({"k": store.as_strided((9, 20), (20, 1), base)}, contract=rows)
    assert "the stride of axis 0 (40 B) is not a multiple of 16 B" in found.message
    crooked = np.zeros(17, dtype=np.uint8)[1:].view(np.float32)
    assert "is not a multiple of 4 B, one element" in kvsan.check_tensors({"k": crooked})[0].message


@pytest.mark.parametrize(("blocks", "broken"), [(2143, False), (2144, True)])
def test_an_element_offset_past_31_bits_is_found_where_offsets_have_32(blocks: int, broken: bool) -> None:
    """Blocks 1,002,240 bytes apart: block 2143 is the first whose offset is beyond 2^31."""
    view = torch.empty(1, dtype=torch.uint8, device="meta").expand(1)
    store = torch.empty(blocks * 1_002_240, dtype=torch.uint8, device="meta")
    view = store.as_strided((blocks, 16), (1_002_240, 1))
    assert rules_of({"k": view}) == []
    found = rules_of({"k": view}, contract=kvsan.TensorContract(element_offset_bits=32))
    assert found == (["int32"] if broken else [])


def test_strides_of_axes_of_size_one_are_canonical_where_that_is_declared() -> None:
    canonical = kvsan.TensorContract(canonical_strides=True)
    store = torch.zeros(4, 3, 8)
    assert rules_of({"k": store[:1], "v": store[1:2, :1]}, contract=kvsan.TensorContract()) == []
    assert rules_of({"k": store[:1]}, contract=canonical) == []
    (found,) = kvsan.check_tensors({"k": store[:, :1][:1]}, contract=canonical)
    assert found.rule == "stride"
    assert "stride 96 B on axis 0" in found.message


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_scalars_and_empty_tensors_have_what_bytes_they_have(device: str) -> None:
    scalar = torch.zeros((), device=device)
    assert rules_of({"a": scalar}) == []
    assert rules_of({"a": scalar, "b": scalar.view(1)}) == ["alias"]
    store = torch.zeros(4, device=device)
    assert rules_of({"a": store, "b": store[2:2], "c": store[4:], "d": torch.empty(0, 3, device=device)}) == []
    assert rules_of({"a": np.array(1.0), "b": np.zeros((3, 0, 2))}) == []
    assert rules_of({}) == []


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC", "BHLNC"])
def test_thousands_of_tensors_take_about_a_second(order: str) -> None:
    views = kv_cache("meta", 1500, order)
    started = time.process_time()
    assert kvsan.check_tensors(views) == []
    assert time.process_time() - started < 4, "0.5 s where nothing else runs"


def test_pairs_ruled_out_share_nothing() -> None:
    """Whatever is not a candidate shares no byte, for views that step, nest and wrap in every way."""
    draw = random.Random(11)
    kept = dropped = 0
    for _ in range(300):
        steps = draw.choice([(24, 6, 2), (30, 5), (64, 16, 4), (7, 3)])
        views = [
            SlotView(
                draw.randint(0, 2 * steps[0]), 1, 0,
                tuple((draw.randint(1, 4), draw.choice((-1, 1)) * step) for step in draw.sample(steps, len(steps) - 1)),
                draw.choice([1, 2]),
            )
            for _ in range(8)
        ]  # fmt: skip
        candidates = [
            {one.place, other.place} for one, other in meeting_pairs([*itertools.starmap(runs_of, enumerate(views))])
        ]
        for one, other in itertools.combinations(range(8), 2):
            if {one, other} in candidates:
                kept += 1
                assert candidates.count({one, other}) == 1
            else:
                dropped += 1
                assert not bytes_of(views[one]) & bytes_of(views[other])
    assert min(kept, dropped) > 500


def bytes_of(view: SlotView) -> set[int]:
    found = {view.offset_bytes}
    for count, stride in (*view.axes, (view.item_bytes, 1)):
        found = {byte + place * stride for byte in found for place in range(count)}
    return found


class FakeCuda:
    """A CuPy array as far as ``check_tensors`` looks: an interface, a device and the allocation behind it."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f2", "data": (address, False), "strides": strides, "version": 3,
        }  # fmt: skip
        self.dtype, self.itemsize = "float16", 2
        self.device = type("Device", (), {"id": 1})()
        self.data: Any = type("Pointer", (), {"mem": type("Memory", (), {"ptr": 1 << 40, "size": 4096})()})()


def test_cuda_arrays_are_read_by_their_interface() -> None:
    base = 1 << 40
    views = {"k": FakeCuda(base, (8, 64), (512, 2)), "v": FakeCuda(base + 256, (8, 64), (512, 2))}
    assert rules_of(views) == []
    assert rules_of({**views, "v": FakeCuda(base + 126, (8, 64), (512, 2))}) == ["alias"]
    (found,) = kvsan.check_tensors({"v": FakeCuda(base + 514, (8, 64), (512, 2))})
    assert found.rule == "bounds"
    assert "float16 on cuda:1" in found.message
    assert rules_of({"k": FakeCuda(base, (2048,))}) == []
    outside = FakeCuda(base, (2049,))
    assert rules_of({"k": outside}) == ["bounds"]
    outside.data.mem = type("UnownedMemory", (), {"ptr": base, "size": 4096})()
    assert rules_of({"k": outside}) == []


class Lying:
    """An object whose interface is whatever it is given."""

    def __init__(self, **interface: object) -> None:
        self.__array_interface__ = interface


class Raising:
    @property
    def __array_interface__(self) -> object:
        raise RuntimeError("two\nlines")


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (None, "tensors: found None, needs a dict from names to tensors"),
        ([np.zeros(3)], "needs a dict"),
        ({3: np.zeros(3)}, "found the name 3, needs a text"),
        ({"k": None}, "tensors['k']: found None, needs a torch, CuPy or NumPy tensor"),
        ({"k": [np.zeros(3), 4]}, "tensors['k[1]']: found 4"),
        ({"k": [np.zeros(3)], "k[0]": np.zeros(3)}, "two tensors are called k[0]"),
        ({"k": "text"}, "needs a torch"),
        ({"k": np.ndarray}, "needs a torch"),
        ({"k": torch.zeros(3).to_sparse()}, "needs a strided tensor"),
        ({"k": Raising()}, "RuntimeError: two lines"),
        ({"k": Lying()}, "KeyError"),
        ({"k": Lying(shape=(2,), typestr="<f4", data=None)}, "needs an address"),
        ({"k": Lying(shape=(2,), typestr="<f4", data=(1.5, False))}, "TypeError"),
        ({"k": Lying(shape=(2,), typestr="?", data=(0, False))}, "needs one of a size"),
        ({"k": Lying(shape=(2,), typestr="<f4", data=(0, False), strides=(4, 4))}, "1 axes and 2 strides"),
        ({"k": Lying(shape=(-2,), typestr="<f4", data=(0, False), strides=(4,))}, "needs sizes of at least 0"),
        ({"k": Lying(shape=(1 << 200,), typestr="<f4", data=(0, False))}, "beyond 127 bits"),
        ({"two\nlines": 5}, "two\\\\nlines"),
    ],
)
def test_what_is_no_tensor_is_refused_in_one_line(tensors: object, words: str) -> None:
    with pytest.raises(kvsan.SpecError) as caught:
        kvsan.check_tensors(tensors)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exclusive": "k"}, "exclusive: found 'k', needs a list of names"),
        ({"exclusive": 3}, "exclusive: found 3"),
        ({"exclusive": ["v"]}, "found 'v', which none of the 1 tensors is called"),
        ({"exclusive": [3]}, "exclusive: found 3, needs a name"),
        ({"contract": {}}, "contract: found {}, needs a kvsan.TensorContract"),
        ({"contract": kvsan.TensorContract(shared=[("k", "x")])}, "contract.shared[0]: found 'x'"),
        ({"contract": kvsan.TensorContract(self_overlap=["x"])}, "contract.self_overlap: found 'x'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(kvsan.SpecError) as caught:
        kvsan.check_tensors({"k": np.zeros(3)}, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"alignment_bytes": 3}, {"alignment_bytes": 0}, {"element_offset_bits": 16}, {"canonical_strides": 1},
     {"shared": "k"}, {"shared": ["k"]}, {"self_overlap": "k"}],
)  # fmt: skip
def test_a_contract_is_validated(fields: dict[str, Any]) -> None:
    with pytest.raises(kvsan.SpecError, match=f"contract.{next(iter(fields))}"):
        kvsan.TensorContract(**fields)


def test_no_more_findings_than_the_limit_are_made() -> None:
    store = torch.zeros(4)
    views = {f"t{number}": store for number in range(2000)}
    started = time.process_time()
    assert len(kvsan.check_tensors(views)) == 20
    assert len(kvsan.check_tensors(views, limit=3)) == 3
    assert time.process_time() - started < 4
