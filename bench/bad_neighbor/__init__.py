"""A noisy tenant that does its worst on each surface, and how that affects a quiet tenant."""
