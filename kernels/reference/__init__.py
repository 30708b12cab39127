"""What the kernels must compute, in plain float64: one readable function each, on contiguous tensors."""
