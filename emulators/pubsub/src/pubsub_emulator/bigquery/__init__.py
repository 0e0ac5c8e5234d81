"""BigQuery subscriptions."""
