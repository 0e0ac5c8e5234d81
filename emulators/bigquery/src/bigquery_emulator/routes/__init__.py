"""The REST side of the embedded BigQuery: routes of the BigQuery API v2, one module a resource."""
