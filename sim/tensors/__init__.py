"""Checks on live tensors of any library: who shares bytes with whom, and does every view stay where it may."""
