"""Predictions: created, read, streamed and canceled by any instance."""
