"""Campaigns over traces of a running cache: what ``ci.campaign`` does for specs."""
