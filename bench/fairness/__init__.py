"""Interference between tenants, and the cost of sharing by work."""
