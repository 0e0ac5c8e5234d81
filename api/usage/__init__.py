"""What callers used, read from the rows in BigQuery."""
