"""Replays in processes of their own: a device that crashes takes no more with it than its process."""
