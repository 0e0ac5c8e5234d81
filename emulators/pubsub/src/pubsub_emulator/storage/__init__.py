"""The state on disk."""
