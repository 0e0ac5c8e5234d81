"""Replicate's API: predictions, their events, models, files and hardware."""
