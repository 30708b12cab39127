"""Scripts that run inside an engine's own environment, where this package need not be; nothing of it is imported."""
