"""Probe kernels: rows of a table say which bytes to write, and which to expect."""
