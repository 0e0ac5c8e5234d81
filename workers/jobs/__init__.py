"""A job's life in a worker: it is pulled, claimed, prepared, and completed."""
