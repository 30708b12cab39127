"""A child process on which cases do what their model is called: a script for the tests of supervision.

    python fake_child.py FOLDER REQUESTS REPLIES

Its device is made up, unless there is a file ``real`` in FOLDER; ``closed`` and ``dead`` there are faults as it opens.
Each child leaves a file with its number in FOLDER/pids.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from kvsan.ci.replay import child
from kvsan.kernels.replay import Replayed, Replayer
from kvsan.model.errors import SpecError

HERE = Path(sys.argv[1])
PIDS = HERE / "pids"
broken = False


class FakeDevice:
    name = "made up"

    def synchronize(self):
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeReplayer:
    def __init__(self, device, max_bytes, allocated):
        self.max_bytes = max_bytes

    def replay(self, layouts):
        for place, layout in enumerate(layouts):
            act(layout.spec.model, place)
            yield Replayed(layout, f"digest of {layout.spec.model}", ())


class ActingReplayer(Replayer):
    def replay(self, layouts):
        def acted():
            for place, layout in enumerate(layouts):
                act(layout.spec.model, place)
                yield layout

        return super().replay(acted())


def act(what, place):
    global broken
    if what == "segfault":
        ctypes.string_at(0)
    elif what == "exit":
        print("last words", file=sys.stderr)
        os._exit(7)
    elif what == "hang":
        time.sleep(1000)
    elif what == "loud":
        print("garbage " * 10_000)
        os.write(1, b"\xff\xfe" * 100_000)
        os.write(2, b"\x00" * 100_000)
    elif what == "corrupt":
        os.write(int(sys.argv[-1]), b"\x05\x00\x00\x00hello")
    elif what == "endless":
        os.write(int(sys.argv[-1]), b"\xff\xff\xff\xff")
    elif what == "wrong":
        raise ValueError("a bug in the replay")
    elif what == "illegal":
        broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif what == "poke":  # a kernel that writes to an address that is nobody's
        import cupy

        kernel = 'extern "C" __global__ void poke(long long at) { *(volatile int*)at = 1; }'
        cupy.RawKernel(kernel, "poke")((1,), (1,), (cupy.int64(16),))
        cupy.cuda.runtime.deviceSynchronize()
    elif what == "crowd" and place:
        os._exit(3)


def open_fake(kind):
    (PIDS / str(os.getpid())).touch()
    if (HERE / "closed").exists():
        raise SpecError("device", "no device today")
    if (HERE / "dead").exists():
        os._exit(5)
    return FakeDevice()


if (HERE / "real").exists():
    child.Replayer = ActingReplayer
else:
    child.open_device, child.Replayer = open_fake, FakeReplayer
    child.versions = lambda kind: {"made up": "1.0"}
    child.disagreements = lambda layout, found: ()
child.main(int(sys.argv[-2]), int(sys.argv[-1]))
