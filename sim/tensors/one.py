"""What can be wrong with one tensor on its own: bounds, alignment, reach of its offsets, strides of axes of size 1."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding, Where
from .contract import TensorContract
from .view import TensorView, address_range, described


def bounds_problems(views: list[TensorView]) -> Iterator[Finding]:
    """Yield tensors that reach bytes before or behind their storage."""
    for view in views:
        if view.storage is None:
            continue
        start, end = view.storage
        first, last = address_range(view)
        if first < start or last > end:
            yield _finding(
                "bounds",
                view,
                f"reaches bytes {first - start} to {last - start} of a storage of {end - start} B",
                "take shape, strides and offset from the storage that is really there (it may have been resized or "
                "freed)",
                first,
            )


def alignment_problems(views: list[TensorView], contract: TensorContract) -> Iterator[Finding]:
    """Yield tensors whose elements are not aligned to themselves, or whose rows not to what the contract declares."""
    for view in views:
        found = _misaligned(view, contract.alignment_bytes)
        if found is not None:
            what, value, need = found
            whose = "what the contract declares" if need == contract.alignment_bytes else "one element"
            yield _finding(
                "alignment",
                view,
                f"{what} ({value} B) is not a multiple of {need} B, {whose}",
                "pad offsets and strides to whole multiples of the access width",
                view.address,
            )


def _misaligned(view: TensorView, declared: int) -> tuple[str, int, int] | None:
    """Return what is misaligned, its value and the need, in bytes; None where nothing is.

    The need of elements of an odd size (packed records) is one byte. Strides along rows, those of one element, are not
    held to the declared width: the row is read at once.
    """
    item = view.item_bytes if view.item_bytes & (view.item_bytes - 1) == 0 else 1
    lowest = address_range(view)[0]
    from_storage = view.storage is not None and view.storage[0] == 0  # a meta tensor counts from its storage's start
    base = "the offset in its storage" if from_storage else "the address of its first byte"
    for need in (item, declared):
        if lowest % need:
            return base, lowest, need
    for axis, (count, stride) in enumerate(zip(view.shape, view.stride_bytes, strict=True)):
        if count > 1:
            along_row = abs(stride) == view.item_bytes
            for need in (item,) if along_row else (item, declared):
                if stride % need:
                    return f"the stride of axis {axis}", stride, need
    return None


def int32_problems(views: list[TensorView], contract: TensorContract) -> Iterator[Finding]:
    """Yield tensors whose farthest element is beyond the integers that carry element offsets."""
    limit = 1 << (contract.element_offset_bits - 1)
    for view in views:
        steps = zip(view.shape, view.stride_bytes, strict=True)
        reach = sum((count - 1) * abs(stride) for count, stride in steps)
        farthest = reach // view.item_bytes  # floor: in whole elements, as a kernel counts
        if farthest >= limit:
            yield _finding(
                "int32",
                view,
                f"has its farthest element {farthest} elements from its first, and a signed "
                f"{contract.element_offset_bits}-bit offset ends at {limit - 1}",
                "compute offsets with 64 bits in every kernel that takes this tensor, or use fewer blocks",
                view.address,
            )


def stride_problems(views: list[TensorView], contract: TensorContract) -> Iterator[Finding]:
    """Yield tensors with an axis of size 1 whose stride a row-major tensor would not have, where that is declared."""
    if not contract.canonical_strides:
        return
    for view in views:
        right = view.item_bytes
        for axis in reversed(range(len(view.shape))):
            stride = view.stride_bytes[axis]
            if view.shape[axis] == 1 and stride != right:
                yield _finding(
                    "stride",
                    view,
                    f"has stride {stride} B on axis {axis} of size 1, where the inner axes take {right} B",
                    "make the view with as_strided and canonical strides; a consumer that reads the stride as a pitch "
                    "takes any value for real",
                    view.address,
                )
                break
            right = view.shape[axis] * stride


def _finding(rule: str, view: TensorView, problem: str, remedy: str, first: int) -> Finding:
    last = max(first, address_range(view)[1] - 1)
    where = Where(tensor=view.name, first_byte=first, last_byte=last)
    return Finding(rule=rule, message=f"{described(view)} {problem}", remedy=remedy, where=(where,))
