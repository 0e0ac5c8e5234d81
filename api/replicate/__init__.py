"""Replicate's API: predictions and their events, models, files, and hardware."""
