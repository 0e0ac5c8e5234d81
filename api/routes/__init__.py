"""Endpoints, each one a function."""
