"""Load: the generator, and the texts that it sends."""
