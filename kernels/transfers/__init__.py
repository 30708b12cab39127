"""Transfers between cache layouts on real memory: on one device, or a process for each rank (``docs/peers.md``)."""
