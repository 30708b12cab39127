"""vLLM's planner and cache tensors, in its three eras (docs/vllm.md)."""
