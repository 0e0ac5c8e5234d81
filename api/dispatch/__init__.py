"""Computes requests: single-flight, admission, jobs and replies."""
