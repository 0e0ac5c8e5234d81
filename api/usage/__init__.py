"""Usage of callers, read from rows in BigQuery."""
