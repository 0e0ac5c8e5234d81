"""Usage rows: what they contain, and how they reach BigQuery."""
