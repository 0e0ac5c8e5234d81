"""Endpoints in the shape of Mistral's API."""
