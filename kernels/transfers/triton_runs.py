"""``copy_runs``: stretches of words from anywhere to anywhere, as many as there are in one launch.

Places are words from an anchor, which may lie in another allocation: addresses are int64 throughout.
"""

# mypy: ignore-errors
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["runs"])
def copy_runs(anchor, sources, targets, lengths, runs: tl.int32, ROWS: tl.constexpr, WORDS: tl.constexpr,
              WIDE: tl.constexpr):  # fmt: skip
    """Copy ``lengths[i]`` words from ``sources[i]`` to ``targets[i]``; a program serves ``ROWS`` of the runs.

    ``WIDE`` says that all three are multiples of four words.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    meant = row < runs
    source = tl.load(sources + row, mask=meant, other=0)
    target = tl.load(targets + row, mask=meant, other=0)
    length = tl.load(lengths + row, mask=meant, other=0)
    if WIDE:
        # floor: no change, but now the compiler knows a factor
        source, target, length = source // 4 * 4, target // 4 * 4, length // 4 * 4  # floor: as above
    for start in range(0, tl.max(length), WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word[None, :] < length[:, None]
        held = tl.load(anchor + source[:, None] + word[None, :], mask=inside, other=0)
        tl.store(anchor + target[:, None] + word[None, :], held, mask=inside)
