"""A cross-encoder on all-MiniLM-L6-v2: its data, its training, and how its weights are joined."""
