"""A job's life in a worker: pulled, claimed, prepared, completed."""
