"""Tenants, keys, and plans: the API's callers, and how much each may use."""
