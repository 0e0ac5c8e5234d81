"""The client of the broker."""
