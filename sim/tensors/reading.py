"""``read_tensors``: torch, CuPy and NumPy tensors as ``TensorView``, told by what they answer and not by their class.

No library is imported. A tensor of torch has ``data_ptr``, ``untyped_storage``, ``storage_offset``, ``stride`` and
``element_size``; CuPy, Numba and JAX arrays have ``__cuda_array_interface__``; NumPy arrays have
``__array_interface__``.
Host and CUDA memory share one address space (unified virtual addressing), so equal addresses are equal bytes. Meta
tensors, and tensors whose storage was freed, have no address: there the storage itself is the space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, Final

import msgspec

from ...model.errors import SpecError, shown
from ..overlap import byte_range
from ..values import MAX_WHOLE
from .view import TensorView, byte_set, label

_TORCH: Final = ("data_ptr", "untyped_storage", "storage_offset", "stride", "element_size")
_UNIFIED: Final = ("cpu", "cuda")
"""Device types whose addresses are those of one address space."""
_ADDRESSES: Final = "addresses"
_TYPE_TEXT: Final = re.compile(r"[<>|=][a-zA-Z](\d+)")
_MOST_BASES: Final = 100


def read_tensors(tensors: object) -> tuple[TensorView, ...]:
    """Return the views of ``{name: tensor}``; a list or tuple of tensors gives ``name[0]``, ``name[1]``, ...

    Raises ``SpecError``, one line, for what is no such mapping, a name that is no text, or a value that is no strided
    tensor.
    """
    if not isinstance(tensors, Mapping):
        raise SpecError("tensors", f"found {_shown(tensors)}, needs a dict from names to tensors")
    views = []
    for name, value in tensors.items():
        if type(name) is not str:
            raise SpecError("tensors", f"found the name {_shown(name)}, needs a text")
        views += [_read(inner, tensor) for inner, tensor in _members(name, value)]
    names = [view.name for view in views]
    if len(set(names)) != len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise SpecError("tensors", f"two tensors are called {label(twice)}, needs a name for each")
    return tuple(views)


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for number, member in enumerate(value):
            yield f"{name}[{number}]", member
    else:
        yield name, value


def _read(name: str, tensor: Any) -> TensorView:
    """Return one tensor's view, or raise ``SpecError`` whatever the object does when it is asked."""
    try:
        if all(callable(getattr(tensor, attribute, None)) for attribute in _TORCH):
            view = _torch_view(name, tensor)
        else:
            view = _array_view(name, tensor)
    except SpecError:
        raise
    except Exception as error:  # somebody else's object: sparse and nested tensors have no strides
        text = " ".join(str(error).split())[:120]
        problem = f"found {_shown(tensor)}, which says {type(error).__name__}: {text}; needs a strided tensor"
        raise SpecError(_field(name), problem) from None
    return view


def _torch_view(name: str, tensor: Any) -> TensorView:
    storage = tensor.untyped_storage()
    item = index(tensor.element_size())
    shape = tuple(map(index, tensor.shape))
    strides = tuple([index(stride) * item for stride in tensor.stride()])
    kind = f"{tensor.dtype} on {tensor.device}"
    size = index(storage.nbytes())
    device = str(getattr(tensor.device, "type", tensor.device))
    stored_on = str(getattr(getattr(storage, "device", None), "type", device))
    base = 0 if stored_on == "meta" else index(storage.data_ptr())
    if base:
        space = _ADDRESSES if device in _UNIFIED else f"addresses on {tensor.device}"
    else:
        space = f"storage {getattr(storage, '_cdata', None) or id(storage)}"
    address = base + index(tensor.storage_offset()) * item
    return _sane(
        TensorView(
            name=name,
            kind=kind,
            space=space,
            address=address,
            shape=shape,
            stride_bytes=strides,
            item_bytes=item,
            storage=(base, base + size),
        )
    )


def _array_view(name: str, array: Any) -> TensorView:
    """Return the view of an array by its CUDA or host array interface."""
    interface = getattr(array, "__cuda_array_interface__", None)
    on_cuda = isinstance(interface, dict)
    if not on_cuda:
        interface = getattr(array, "__array_interface__", None)
    if not isinstance(interface, dict):
        raise SpecError(_field(name), f"found {_shown(array)}, needs a torch, CuPy or NumPy tensor")
    view = _from_interface(name, array, interface, on_cuda)
    storage = _cuda_storage(array) if on_cuda else _host_storage(array)
    return msgspec.structs.replace(view, storage=storage)


def _from_interface(name: str, array: Any, interface: dict[str, Any], on_cuda: bool) -> TensorView:
    shape = tuple(map(index, interface["shape"]))
    item = _item_bytes(name, array, interface)
    strides = interface.get("strides")
    if strides is None:
        strides, pitch = [], item
        for size in reversed(shape):
            strides.append(pitch)
            pitch *= max(1, size)
        strides.reverse()
    data = interface.get("data")
    if not isinstance(data, tuple) or not data:
        raise SpecError(_field(name), f"found an array interface with data {_shown(data)}, needs an address")
    dtype = shown(str(getattr(array, "dtype", interface.get("typestr")))).strip("'")
    device = getattr(getattr(array, "device", None), "id", None)
    where = "cuda" + (f":{device}" if type(device) is int else "") if on_cuda else "the host"
    return _sane(
        TensorView(
            name=name,
            kind=f"{dtype} on {where}",
            space=_ADDRESSES,
            address=index(data[0]),
            shape=shape,
            stride_bytes=tuple(map(index, strides)),
            item_bytes=item,
            storage=None,
        )
    )


def _item_bytes(name: str, array: Any, interface: dict[str, Any]) -> int:
    item = getattr(array, "itemsize", None)
    if type(item) is int:
        return item
    found = _TYPE_TEXT.match(str(interface.get("typestr")))
    if found is None:
        raise SpecError(_field(name), f"found the element type {_shown(interface.get('typestr'))}, needs one of a size")
    width = 4 if str(interface["typestr"])[1] == "U" else 1  # a text counts characters, of four bytes each
    return int(found[1]) * width


def _cuda_storage(array: Any) -> tuple[int, int] | None:
    """Return the allocation behind a CuPy array, None where it is another library's, of which CuPy knows no bounds."""
    memory = getattr(getattr(array, "data", None), "mem", None)
    if type(memory).__name__ == "UnownedMemory":  # its size is a guess from shape and strides
        return None
    start, size = getattr(memory, "ptr", None), getattr(memory, "size", None)
    if type(start) is not int or type(size) is not int:
        return None
    return start, start + size


def _host_storage(array: Any) -> tuple[int, int] | None:
    """Return the memory of the array that owns a host array's bytes: the last one behind it that is an array."""
    owner = array
    for _ in range(_MOST_BASES):
        base = getattr(owner, "base", None)
        if base is None:
            break
        if isinstance(getattr(base, "__array_interface__", None), dict):
            owner = base
        elif all(callable(getattr(base, attribute, None)) for attribute in _TORCH):
            return _torch_view("", base).storage
        else:
            break  # a buffer that does not say where it lies
    view = _from_interface("", owner, owner.__array_interface__, on_cuda=False)
    return byte_range(byte_set(view))


def _sane(view: TensorView) -> TensorView:
    """Return ``view``; refuse shapes, strides and addresses that no tensor has."""
    if len(view.shape) != len(view.stride_bytes):
        found = f"found {len(view.shape)} axes and {len(view.stride_bytes)} strides"
        raise SpecError(_field(view.name), f"{found}, needs as many of each")
    if view.item_bytes < 0 or (view.shape and min(view.shape) < 0):
        raise SpecError(
            _field(view.name), f"found shape {view.shape} of {view.item_bytes} B, needs sizes of at least 0"
        )
    numbers = (view.address, view.item_bytes, math.prod(view.shape), *view.stride_bytes)
    if max(map(abs, numbers)) > MAX_WHOLE:
        raise SpecError(_field(view.name), "found sizes beyond 127 bits, needs those of a real tensor")
    return view


def _field(name: str) -> str:
    return f"tensors[{label(name)!r}]"


def _shown(value: object) -> str:
    return " ".join(shown(value).split())
