"""Model processes: the pool, the parent and child sides, and their protocol."""
