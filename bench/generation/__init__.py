"""Text generation: our engine compared with other engines running the same weights."""
