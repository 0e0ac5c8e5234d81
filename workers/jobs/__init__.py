"""A job's life in a worker, where it is pulled, claimed, prepared, and completed."""
