"""Paged attention over strided caches: decode, prefill, skip-softmax, latent and sparse attention."""
