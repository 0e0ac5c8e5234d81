"""Caller limits: per-minute rates, items in flight, and monthly budgets."""
