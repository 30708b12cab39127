"""Which layers slide, and over how many tokens: the many spellings of a sliding window, as one window per layer.

In order: ``use_sliding_window`` false switches windows off; a list is a pattern to repeat; ``layer_types`` names each
layer; a pattern number (from the config, else the family's own) leaves every N-th layer full; else the family's rule.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from ..errors import require_int
from ..layers import MAX_TOKENS
from .fields import MAX_LAYERS, Fields, shown_briefly
from .geometry import FULL_NAMES, kinds_from_names

WindowRule: TypeAlias = int | Literal["tail", "all", "unknown"]
"""A family's rule where the config has no ``layer_types``: a number N leaves every N-th layer full, the others slide;
``"tail"``: layers from ``max_window_layers`` on slide; ``"all"``: every layer does; ``"unknown"``: as all, if nothing
speaks against it."""

_VALUE_NAMES: Final = ("sliding_window", "interleaved_sliding_window", "sliding_window_size")
_PATTERN_NAMES: Final = ("sliding_window_pattern", "_sliding_window_pattern")


def read_windows(fields: Fields, count: int, rule: WindowRule) -> list[int | None]:
    """Return each layer's sliding window in tokens, None for full attention."""
    if fields.flag("use_sliding_window") is False:
        return _switched_off(fields, count)
    name = fields.first(*_VALUE_NAMES)
    if isinstance(fields.values.get(name), (list, tuple)):
        return _from_list(fields, name, count)
    window = fields.optional_whole(name, 1, MAX_TOKENS)
    if fields.has("layer_types"):
        return _from_layer_types(fields, count, window)
    period = _period(fields, rule, window)
    if period is not None:
        if window is None:
            fields.require("sliding_window")
        return [window if (index + 1) % period else None for index in range(count)]
    if window is None:
        return [None] * count
    if rule == "tail":
        first = fields.whole("max_window_layers", 0, MAX_LAYERS)
        fields.infer(f"layer_types is absent: layers from max_window_layers, {first}, on slide.")
        return [window if index >= first else None for index in range(count)]
    if rule == "unknown" and fields.has("max_window_layers"):
        raise fields.error("layer_types", "missing, needs one entry for each layer (max_window_layers is ambiguous)")
    fields.infer(f"layer_types is absent: {name}, {window} tokens, is taken to hold for every layer.")
    return [window] * count


def _period(fields: Fields, rule: WindowRule, window: int | None) -> int | None:
    own = rule if isinstance(rule, int) else None
    name = fields.first(*_PATTERN_NAMES, *(("layer_switch",) if own else ()))
    if fields.has(name) and (own is not None or window is not None):
        period = fields.whole(name, 1, MAX_LAYERS)
        fields.infer(f"layer_types is absent: of every {period} layers ({name}) the last is full, the others slide.")
        return period
    if own is not None:
        fields.infer(f"layer_types is absent: as usual in this family, of every {own} layers the last is full.")
    return own


def _switched_off(fields: Fields, count: int) -> list[int | None]:
    if fields.has("sliding_window"):
        fields.infer("use_sliding_window is false: sliding_window is ignored, every layer is full attention.")
    if not fields.has("layer_types"):
        return [None] * count
    if any(isinstance(entry, str) and entry == "sliding_attention" for entry in fields.entries("layer_types")):
        raise fields.error("use_sliding_window", "found false, needs true as layer_types names sliding_attention")
    return _from_layer_types(fields, count, None)


def _from_layer_types(fields: Fields, count: int, window: int | None) -> list[int | None]:
    vocabulary = {**dict.fromkeys(FULL_NAMES, "full"), "sliding_attention": "sliding"}
    kinds = kinds_from_names(fields, "layer_types", vocabulary, count)
    if window is None and "sliding" in kinds:
        raise fields.error("sliding_window", "missing, needs a number of tokens as layer_types names sliding_attention")
    return [window if kind == "sliding" else None for kind in kinds]


def _from_list(fields: Fields, name: str, count: int) -> list[int | None]:
    windows: list[int | None] = []
    for position, value in enumerate(fields.entries(name)):
        entry = f"{name}[{position}]"
        if value is not None and type(value) is not int:
            raise fields.error(entry, f"found {shown_briefly(value)}, needs a number of tokens or null")
        windows.append(None if value is None else require_int(fields.prefix + entry, value, 1, MAX_TOKENS))
    if not windows:
        raise fields.error(name, "found an empty list, needs the windows (in tokens, or null) of one period of layers")
    fields.infer(f"{name} is a list of {len(windows)}: taken as a pattern repeated over the {count} layers.")
    return [windows[index % len(windows)] for index in range(count)]
