"""What a real engine's own code answers, as layouts: tensors that it made, and where they lie (docs/engines.md)."""
