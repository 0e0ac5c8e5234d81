"""REST routes of the BigQuery API v2, one module per resource."""
