"""Predictions, which any instance can create, read, stream, and cancel."""
