"""Trials: a kernel over a fuzzed shape and layout, against its float64 reference."""
