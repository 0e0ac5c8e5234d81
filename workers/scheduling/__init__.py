"""Chooses the next model and batch to run."""
