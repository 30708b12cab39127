"""Where an engine's tensors lie, in plain numbers; the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def described(views: Iterable[tuple[str, int, int, tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return where views lie, given as (layer, part, group, axes, tensor), and the bytes of each storage."""
    storages: dict[int, int] = {}
    sizes: list[int] = []
    found = []
    for name, part, group, axes, view in views:
        storage = view.untyped_storage()
        place = storages.setdefault(storage._cdata, len(storages))
        if place == len(sizes):
            sizes.append(storage.nbytes())
        found.append(
            {
                "name": name,
                "part": part,
                "group": group,
                "allocation": place,
                "axes": list(axes),
                "offset": view.storage_offset() * view.element_size(),
                "shape": list(view.shape),
                "stride": list(view.stride()),
                "item": view.element_size(),
            }
        )
    return {"allocations": sizes, "views": found}
