"""Layouts on real memory: raw allocations, probe kernels, and what memory says of a layout.

    from kvsan.kernels.device import open_device
    from kvsan.kernels.replay import Replayer

    for result in Replayer(open_device("cpu")).replay([layout]):
        print(result.digest, result.findings)

Importing this package imports nothing; opening a device imports torch and triton, and on a GPU cupy.
"""
