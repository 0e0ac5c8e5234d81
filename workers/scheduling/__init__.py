"""Chooses the model and the batch that run next."""
