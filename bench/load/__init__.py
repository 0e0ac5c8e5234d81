"""Load: the generator and the texts it sends."""
