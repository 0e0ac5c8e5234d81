"""A noisy tenant that does its worst on each surface, and its effect on a quiet tenant."""
