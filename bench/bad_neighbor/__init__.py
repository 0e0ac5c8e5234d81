"""A noisy tenant that does its worst on each surface, and the effect on a quiet tenant."""
