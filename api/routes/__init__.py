"""Endpoints, each of which is a function."""
