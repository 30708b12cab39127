"""Recurrent state updates on strided states: causal convolution, Mamba-2, gated delta rule."""
