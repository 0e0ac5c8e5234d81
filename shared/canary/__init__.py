"""Two revisions of a model running side by side: their comparison and state."""
