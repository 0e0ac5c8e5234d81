"""Tenants, keys and plans: callers of the API, and how much each may use."""
