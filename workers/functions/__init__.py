"""The functions behind Pub/Sub push: one answers the callers of dead letters, one delivers webhooks."""
