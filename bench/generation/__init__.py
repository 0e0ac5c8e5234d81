"""Text generation: the engine compared with others that run the same weights."""
