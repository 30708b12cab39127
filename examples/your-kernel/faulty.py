"""The same kernel with a stride fault: it takes the distance of two tokens from the shape, not from the view.

For a dense head-major page that is the same number, and all its author's tests had such pages.
"""

import sound

from kvsan.model.errors import SpecError


def decode(problem, queries, out):
    """Launch the kernel of ``sound`` with a token stride of ``dim`` elements."""
    key, value = problem.key.data, problem.value.data
    if key.format.value not in ("bf16", "fp16", "fp32") or problem.window is not None:
        raise SpecError("kernel", "this kernel knows bf16, fp16 and fp32, and no sliding window")
    strides = {}
    for name, view in (("k", key), ("v", value)):
        strides[f"{name}_start"], strides[f"{name}_slot"] = view.start, view.slot_stride
        strides[f"{name}_head"], strides[f"{name}_token"] = view.stride("head"), view.dim
        strides[f"{name}_dim"] = view.stride("dim")
    sound.launch(problem, queries, out, strides)
