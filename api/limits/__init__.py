"""Limits of callers: rates per minute, items in flight, and monthly budgets."""
