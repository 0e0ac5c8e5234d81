"""Usage rows on their way to BigQuery."""
