"""Usage of callers, read from the rows in BigQuery."""
