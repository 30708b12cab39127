"""What kernels compute over a layout: filled through its consumers' formulas, read through them, and compared.

from kvsan.kernels.device import open_device
from kvsan.kernels.results.judging import judge_kernels

report = judge_kernels(open_device("cpu"), layout)
print(report.findings, report.refused)
"""
