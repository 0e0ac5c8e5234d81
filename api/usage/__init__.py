"""Callers' usage, read from rows in BigQuery."""
