"""Caller limits: rates per minute, items in flight, and monthly budgets."""
