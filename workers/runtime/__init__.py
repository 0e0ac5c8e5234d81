"""Model processes: the pool, the parent's and the child's side, their protocol."""
