"""Text generation: the engine compared with others that compute the same weights."""
