"""A bad tenant that does its worst on each surface, and what a quiet one beside it notices."""
