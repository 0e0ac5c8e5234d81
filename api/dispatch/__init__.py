"""Computes requests: single-flight, admission, jobs, replies."""
