"""The same cache on the other side of a transfer: what ranks register, whether they fit, what moves, and the proof.

NumPy is imported by ``execution``, ``truth`` and ``proof`` alone, which ``pair`` needs.
"""
