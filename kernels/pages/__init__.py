"""Moving whole pages: gathered for a transfer, scattered on arrival, copied for a beam's fork."""
