"""Two revisions of a model running side by side: how they compare, and their state."""
