"""The running cache: sequences, beams, reuse and tiers over the bytes of a layout, with an owner for every byte.

    trace = Trace(spec=spec, operations=(Operation("admit", 0, 3), Operation("step", 1), Operation("complete")))
    run_trace(trace, "trtllm-v2").findings

Importing this package imports nothing; ``trace`` needs no NumPy, everything else here does.
"""
