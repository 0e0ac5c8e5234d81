"""Pub/Sub API calls, one module per resource."""
