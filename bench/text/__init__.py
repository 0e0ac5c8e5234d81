"""Text generation: the engine beside what else computes the same weights."""
