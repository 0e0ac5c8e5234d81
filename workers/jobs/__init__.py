"""A job in a worker: pulled, claimed, prepared, completed."""
