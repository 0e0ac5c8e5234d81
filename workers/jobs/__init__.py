"""A job's life cycle in a worker, where it is pulled, claimed, prepared, and completed."""
