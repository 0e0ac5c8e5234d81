"""Two revisions of a model side by side: how they are compared, and what is known of them."""
