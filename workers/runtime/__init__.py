"""Model processes: the pool, the parent and child sides, and the protocol between them."""
