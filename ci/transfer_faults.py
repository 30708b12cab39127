"""The faults of transfers: what each breaks, the smallest pair that shows it, where it happened.

They belong to the table of ``ci.faults``, which lists them behind the others.

    >>> fault = TRANSFER_FAULTS[0]
    >>> fault.name, fault.rules, fault.minimum.source.parallel.name, fault.minimum.destination.parallel.name
    ('fault:pp-equal-division', ('layer-map',), 'tp1', 'tp1')

A minimum is the simplest pair of a stated grid (``transfer_minima``) on which the fault's rules fire, as JSON, defaults
left out.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ..sim.transfer.faulty import FAULTY_TRANSFERS
from ..sim.transfer.pair import Pair
from .transfer_minima import pair_size


class TransferFault(msgspec.Struct, frozen=True, kw_only=True):
    """One faulty transfer.

    ``rules`` must fire, ``follow`` may; ``minimum_json`` is the simplest pair, ``source`` where it happened, ``cause``
    one line.
    """

    name: str
    kind: Literal["transfer"] = "transfer"
    code: str = ""
    rules: tuple[str, ...]
    follow: tuple[str, ...] = ()
    base: str = "transfer"
    cause: str
    source: str
    minimum_json: bytes

    @property
    def minimum(self) -> Pair:
        """The simplest pair on which the fault's rules fire."""
        return msgspec.json.decode(self.minimum_json, type=Pair)

    @property
    def size(self) -> int:
        """Layers plus buffers of both sides of the minimum."""
        return pair_size(self.minimum)


_CAUSES: Final = {method.name: method.summary for method in FAULTY_TRANSFERS}
_TRTLLM: Final = "https://github.com/NVIDIA/TensorRT-LLM/pull/"
_VLLM: Final = "https://github.com/vllm-project/vllm/issues/"
_SGLANG: Final = "https://github.com/sgl-project/sglang/pull/"

_LATENT: Final = '{"kind":"latent","latent_dim":128}'
_TWO_HEADS: Final = '{"kind":"attention","kv_heads":2,"head_dim":128}'
_INDEX: Final = '{"role":"index_key","dim":128,"format":"bf16"}'
_POSITION: Final = '{"role":"qsa_index_position","dim":3,"format":"int32","scope":"rank"}'
_DELTA: Final = '"kind":"recurrent","algorithm":"gdn","heads":2,"head_dim":1,"groups":2,"state_dim":1,"conv_kernel":2'


def _sparse(heads: int, dim: int) -> str:
    planes = f"{_INDEX},{_POSITION}"
    return f'{{"kind":"attention","kv_heads":{heads},"head_dim":{dim},"side_planes":[{planes}]}}'


def _pair(layers: str, source: str = "", destination: str = "", tokens: int = 1) -> bytes:
    """Return the JSON text of a pair of one model; what is given of a side differs from the defaults."""
    sides = []
    for fields in (source, destination):
        own = (
            fields
            if '"tokens_per_block"' in fields
            else f'"tokens_per_block":{tokens}' + (f",{fields}" if fields else "")
        )
        sides.append(f'{{"kvsan":"spec","slots":1,"layers":[{layers}],{own}}}')
    return f'{{"kvsan":"pair","source":{sides[0]},"destination":{sides[1]}}}'.encode()


def _parallel(**degrees: int) -> str:
    return f'"parallel":{msgspec.json.encode(degrees).decode()}'


_NHD: Final = '"consumer":{"kv_layout":"NHD"}'


def _fault(name: str, minimum: bytes, **fields: Any) -> TransferFault:
    return TransferFault(name=name, cause=_CAUSES[name], minimum_json=minimum, **fields)


TRANSFER_FAULTS: Final[tuple[TransferFault, ...]] = (
    _fault(
        "fault:pp-equal-division",
        _pair(",".join(['{"kind":"uncached"}', _LATENT, _LATENT])),
        rules=("layer-map",),
        follow=("peer",),
        source=f"{_TRTLLM}7117",
    ),
    _fault(
        "fault:layers-by-position",
        _pair(f"{_LATENT},{_LATENT}", destination=_parallel(pp=2)),
        rules=("layer-map",),
        follow=("peer",),
        source=f"https://github.com/vllm-project/vllm-ascend/pull/15900, {_SGLANG}37175",
    ),
    _fault(
        "fault:role-by-pool-number",
        _pair(_sparse(2, 64), destination=_parallel(tp=2)),
        rules=("peer",),
        source=f"{_TRTLLM}16237",
    ),
    _fault(
        "fault:heads-times-ranks",
        _pair(_TWO_HEADS, destination=_parallel(tp=4)),
        rules=("head-map",),
        follow=("peer",),
        source=f"{_SGLANG}19086",
    ),
    _fault(
        "fault:every-replica-sends",
        _pair(_LATENT, source=_parallel(tp=2)),
        rules=("peer",),
        source="planted: the sender rule among replicas dropped",
    ),
    _fault(
        "fault:plane-as-far-as-it-fits",
        _pair(f"{_sparse(1, 128)},{_sparse(1, 128)}", destination=_parallel(pp=2)),
        rules=("peer",),
        follow=("layer-map",),
        source=f"planted: the size check of packed planes dropped, which {_TRTLLM}20904 relies on",
    ),
    _fault(
        "fault:wire-typed-by-first-pool",
        _pair(f'{{{_DELTA},"ssm_format":"fp32"}}'),
        rules=("peer",),
        follow=("record-layout", "layer-map", "head-map"),
        source=f"{_TRTLLM}16505",
    ),
    _fault(
        "fault:token-major-as-head-major",
        _pair(_TWO_HEADS, source=_NHD, destination=f"{_NHD},{_parallel(tp=2)}", tokens=2),
        rules=("head-map",),
        follow=("record-layout", "peer"),
        source=f"{_VLLM}46204",
    ),
    _fault(
        "fault:conv-state-as-one",
        _pair(f"{{{_DELTA}}}", destination=_parallel(tp=2)),
        rules=("record-layout",),
        source=f"{_VLLM}37638",
    ),
    _fault(
        "fault:block-for-block",
        _pair(_LATENT, destination='"tokens_per_block":2'),
        rules=("peer",),
        follow=("head-map", "layer-map", "record-layout"),
        source="planted: blocks of different tokens paired one for one",
    ),
)
"""All of them."""
