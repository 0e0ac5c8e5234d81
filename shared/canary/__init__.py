"""Two revisions of a model side by side: their comparison and state."""
