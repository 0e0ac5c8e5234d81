"""Runs inference requests: single flight, admission, jobs, and replies."""
