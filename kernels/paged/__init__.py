"""Layouts in memory as kernels are handed them: pointers, page tables and strides."""
