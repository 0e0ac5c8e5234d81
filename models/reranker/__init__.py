"""A cross-encoder on all-MiniLM-L6-v2: data, training, and merging its weights."""
