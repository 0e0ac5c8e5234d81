"""Text generation: our engine compared with others running the same weights."""
