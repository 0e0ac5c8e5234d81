"""Tenants, keys and plans: who may call the API, and how much each caller may use."""
