"""A tiny hybrid model that generates on top of the running cache, through the bytes of a layout.

    model = HybridModel(spec, seed=0)
    paged = Deployment(spec, "trtllm-v2")
    plain = ContiguousStore(spec)
    greedy(model, paged, {0: prompt(0, 12)}, 8) == greedy(model, plain, {0: prompt(0, 12)}, 8)

Everything but the stored bytes is float64, and every token is computed alone, so what is compared is the cache: two
allocators, two parallel layouts or two replays of one request give the same tokens, and the same logits to the last
bit. Importing this package imports nothing; its modules need torch, and no GPU.
"""
