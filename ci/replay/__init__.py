"""Replays under supervision: the device lives in child processes, whose death costs one case and not the run.

    options = ReplayOptions(device="cpu")
    for outcome in supervise([SpecJob(spec=encode_spec(spec), allocator="trtllm-v2")], options):
        print(outcome.status, outcome.digest)

``messages`` is what parent and child say to each other, ``child`` the child, ``process`` one child as the parent sees
it, ``supervisor`` the run over all of them. Nothing here imports torch, triton or cupy in the parent.
"""
